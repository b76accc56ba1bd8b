// SPDX-License-Identifier: Apache-2.0
// Kernels that leave one stage out (no exponential, no fusion, no V), or do nothing but read: timed beside the real
// ones, so that a miss can be placed. Their results are wrong; they are part of this program alone.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "kernel.h"

namespace distr::test {

// Named "<kernel>, <what is left out>".
[[nodiscard]] std::span<const ForwardKernel> forward_twins();

// The twin of a grouping kernel that only reads its inputs, with the same grid.
[[nodiscard]] std::optional<GroupingKernel> reading_twin(const GroupingKernel& kernel);

}  // namespace distr::test
