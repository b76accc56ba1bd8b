// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_80 forward with near keys (near.cuh).
#pragma once

#include <string>

#include "kernel.h"

namespace distr::cuda::sm80 {

// Why it does not serve a grouping with near keys that forward_supports() otherwise; empty: it does.
[[nodiscard]] std::string near_unsupported_reason(const Problem& problem, const Grouping& grouping);
[[nodiscard]] KernelPlan<ForwardTensors> plan_near_forward(const Problem& problem, const Grouping& grouping,
                                                           const Execution& execution);

}  // namespace distr::cuda::sm80
