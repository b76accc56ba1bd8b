// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_80 forward kernel where a tile has the rows of all query heads of a KV head, and lengths may
// be data.
#pragma once

#include <string>

#include "kernel.h"

namespace distr::cuda::sm80 {

[[nodiscard]] std::string sequences_supports(const Problem& problem, const Grouping& grouping);
[[nodiscard]] KernelPlan<ForwardTensors> plan_sequences(const Problem& problem, const Grouping& grouping,
                                                        const Execution& execution);

}  // namespace distr::cuda::sm80
