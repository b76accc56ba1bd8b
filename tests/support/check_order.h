// SPDX-License-Identifier: Apache-2.0
// A backend's orders against the reference's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/cases.h"

namespace distr::test {

// Why an order is wrong: it must be the reference's but for columns that rounding may move. Empty: it is right.
std::string check_order(const Instance& instance, const std::int32_t* order);
// The same of all that a grouping writes over -1: the order, unless it is the caller's, and the means over the keys.
std::string check_grouping(const Instance& instance, const std::vector<std::int32_t>& order,
                           const std::vector<float>& key_means);

}  // namespace distr::test
