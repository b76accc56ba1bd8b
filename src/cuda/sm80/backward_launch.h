// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_80 backwards: what they take, and what a call does.
#pragma once

#include <string>

#include "kernel.h"

namespace distr::cuda::sm80 {

[[nodiscard]] std::string backward_supports(const Problem& problem, const Grouping& grouping);
[[nodiscard]] KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping,
                                                        const Execution& execution);
// The same problems, with dQ summed by atomic additions: quicker, but not the same bits in every run.
[[nodiscard]] KernelPlan<BackwardTensors> plan_backward_atomics(const Problem& problem, const Grouping& grouping,
                                                                const Execution& execution);

}  // namespace distr::cuda::sm80
