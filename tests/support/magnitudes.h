// SPDX-License-Identifier: Apache-2.0
// Scores of every magnitude: the softmax knows their differences alone.
#pragma once

#include <string>
#include <vector>

#include "support/cases.h"

namespace distr::test {

// The case with Q and K times powers of 2, from about 1e-30 to 1e30 as far as its dtype holds them, and its sums of
// columns.
[[nodiscard]] std::vector<Instance> magnified(const Case& test_case);

}  // namespace distr::test
