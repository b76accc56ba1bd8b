// SPDX-License-Identifier: Apache-2.0
// Ablations: kernels that leave a stage out, or do nothing but read. They are timed beside the real ones and say where
// a miss comes from. Their results are wrong; they are part of this program alone.
#pragma once

#include <optional>
#include <vector>

#include "kernel.h"

namespace distr::test {

// A grouping kernel that only reads its inputs, with the same grid.
[[nodiscard]] std::optional<GroupingKernel> reading_ablation(const GroupingKernel& kernel);
// The same with an empty launch behind it, of a kernel that is two launches.
[[nodiscard]] std::optional<GroupingKernel> launching_ablation(const GroupingKernel& kernel);

struct ForwardAblation {
  const char* stage;  // the stage: "exponential", "fusion" or "values"
  ForwardKernel kernel;
};

// Those of a forward kernel; each refuses the problems whose compiled shape it lacks.
[[nodiscard]] std::vector<ForwardAblation> forward_ablations(const ForwardKernel& kernel);
// Those of sm90/forward, and of sm90/forward_blocks.
[[nodiscard]] std::vector<ForwardAblation> hopper_forward_ablations(const ForwardKernel& kernel);
[[nodiscard]] std::vector<ForwardAblation> hopper_blocks_ablations(const ForwardKernel& kernel);

}  // namespace distr::test
