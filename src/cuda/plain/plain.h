// SPDX-License-Identifier: Apache-2.0
// The plain kernels: fp32 arithmetic without tensor cores, for every shape, mask and grouping of f16, bf16 and f32.
// They are what the others are read and judged against, and what serves fp32.
#pragma once

#include <string>

#include "kernel.h"

namespace distr::cuda::plain {

// Refuses f64, and more tiles than a grid has blocks.
[[nodiscard]] std::string supports(const Problem& problem, const Grouping& grouping);

[[nodiscard]] KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping,
                                                      const Execution& execution);
[[nodiscard]] KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping,
                                                        const Execution& execution);

}  // namespace distr::cuda::plain
