// SPDX-License-Identifier: Apache-2.0
// Kernels that leave a stage out, or do nothing but read: timed beside the real ones, so that a miss can be placed.
// Their results are wrong; they are part of this program alone.
#pragma once

#include <optional>
#include <vector>

#include "kernel.h"

namespace distr::test {

// The twin of a grouping kernel that only reads its inputs, with the same grid.
[[nodiscard]] std::optional<GroupingKernel> reading_twin(const GroupingKernel& kernel);
// The same with an empty launch behind it, of a kernel that is two launches.
[[nodiscard]] std::optional<GroupingKernel> launching_twin(const GroupingKernel& kernel);

struct ForwardTwin {
  const char* without;  // the stage: "exponential", "fusion" or "values"
  ForwardKernel kernel;
};

// The twins of a forward kernel; each refuses the problems whose kernel it has no twin of.
[[nodiscard]] std::vector<ForwardTwin> forward_twins(const ForwardKernel& kernel);
// Those of sm90/forward, and of sm90/forward_blocks.
[[nodiscard]] std::vector<ForwardTwin> hopper_forward_twins(const ForwardKernel& kernel);
[[nodiscard]] std::vector<ForwardTwin> hopper_blocks_twins(const ForwardKernel& kernel);

}  // namespace distr::test
