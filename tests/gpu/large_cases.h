// SPDX-License-Identifier: Apache-2.0
// Problems that are too large for the shared list.
#pragma once

#include <vector>

#include "support/cases.h"

namespace distr::test {

// Lengths that no tile divides, and enough of them for every stage of a pipeline.
[[nodiscard]] std::vector<Case> large_cases();

}  // namespace distr::test
