// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_90a forward kernel: what it takes, and what a call does.
#pragma once

#include <span>
#include <string>

#include "cuda/sm90/variants.h"
#include "kernel.h"

namespace distr::cuda::sm90 {

// Exact attention, and one grouping for the whole sequence.
[[nodiscard]] std::string forward_supports(const Problem& problem, const Grouping& grouping);
// Groupings of blocks of their own.
[[nodiscard]] std::string forward_blocks_supports(const Problem& problem, const Grouping& grouping);
[[nodiscard]] KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping,
                                                      const Execution& execution);
// The same with other compiled shapes than the library's. Where these have none with the scale in the softmax, LSE
// cannot be asked for.
[[nodiscard]] KernelPlan<ForwardTensors> plan_forward_among(std::span<const Variant> variants, const Problem& problem,
                                                            const Grouping& grouping, const Execution& execution);

}  // namespace distr::cuda::sm90
