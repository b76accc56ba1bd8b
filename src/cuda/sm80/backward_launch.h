// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_80 backward: what it takes, its workspace, and what runs before its kernels.
#pragma once

#include <cstddef>
#include <string>

#include "distr/attention.h"

namespace distr::cuda::sm80 {

std::string backward_supports(const Problem& problem, const Grouping& grouping);
std::size_t backward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& execution);

}  // namespace distr::cuda::sm80
