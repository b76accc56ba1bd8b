// SPDX-License-Identifier: Apache-2.0
// What can be streamed.
#pragma once

#include <string>

#include "distr/grouping.h"

namespace distr::distributed {

[[noreturn]] void throw_invalid(const std::string& message);

// Throws Error(invalid_argument) for what validate() refuses, masks, parts of longer calls, rows that overlap, and
// elements of O that do.
void validate_streamed(const Problem& problem, const Grouping& grouping);

}  // namespace distr::distributed
