// SPDX-License-Identifier: Apache-2.0
// Problems that are too large for the shared list.
#pragma once

#include <vector>

#include "support/cases.h"

namespace distr::test {

// Lengths that no tile divides, and enough of them for every stage of a pipeline.
[[nodiscard]] std::vector<Case> large_cases();
// What the kernels of the backward are given of a case: all of it, or fewer keys where the emulator would run long.
[[nodiscard]] Case of_backward(const Case& test_case);

}  // namespace distr::test
