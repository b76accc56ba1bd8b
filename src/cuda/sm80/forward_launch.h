// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_80 forward kernel: what it takes, and what a call does.
#pragma once

#include <span>
#include <string>

#include "cuda/sm80/variants.h"
#include "kernel.h"

namespace distr::cuda::sm80 {

[[nodiscard]] std::string forward_supports(const Problem& problem, const Grouping& grouping);
[[nodiscard]] KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping,
                                                      const Execution& execution);
// The same with other compiled shapes than the library's, in order of preference.
[[nodiscard]] KernelPlan<ForwardTensors> plan_forward_among(std::span<const Variant> variants, const Problem& problem,
                                                            const Grouping& grouping, const Execution& execution);

}  // namespace distr::cuda::sm80
