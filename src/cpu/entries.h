// SPDX-License-Identifier: Apache-2.0
// The CPU backend's operations. Each source is built once for each instruction set, and picks one at run time.
#pragma once

#include "cpu/tiling.h"
#include "kernel.h"

namespace distr::cpu {

// Whether the CPU has AVX512_BF16, and gains by it.
[[nodiscard]] bool multiplies_pairs();

KernelPlan<GroupingTensors> plan_grouping(const Problem& problem, const Grouping& grouping, const Execution& execution);
template <Products kProducts>
KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping, const Execution& execution);
template <Products kProducts>
KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping, const Execution& execution);

}  // namespace distr::cpu
