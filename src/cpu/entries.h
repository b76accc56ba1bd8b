// SPDX-License-Identifier: Apache-2.0
// The CPU backend's operations. Each source is built once for each instruction set, and picks one at run time.
#pragma once

#include "cpu/tiling.h"
#include "kernel.h"

namespace distr::cpu {

// What the kernels for bf16 multiply on this CPU; floats where it has nothing quicker.
[[nodiscard]] Products products_of_bf16();
// Whether the code for this CPU's instruction set has products of pairs.
[[nodiscard]] bool target_has_pairs();

KernelPlan<GroupingTensors> plan_grouping(const Problem& problem, const Grouping& grouping, const Execution& execution);
KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping, const Execution& execution);
KernelPlan<ForwardTensors> plan_forward_bf16(const Problem& problem, const Grouping& grouping,
                                             const Execution& execution);
KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping, const Execution& execution);
KernelPlan<BackwardTensors> plan_backward_bf16(const Problem& problem, const Grouping& grouping,
                                               const Execution& execution);

}  // namespace distr::cpu
