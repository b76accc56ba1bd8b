// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_90a backward kernel: what it takes, its workspace, and what runs before and after it.
#pragma once

#include <cstddef>
#include <string>

#include "distr/attention.h"

namespace distr::cuda::sm90 {

std::string backward_supports(const Problem& problem, const Grouping& grouping);
std::size_t backward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& execution);

// The same problems, with dQ summed in whatever order the blocks of keys come to it.
std::size_t backward_atomics_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_backward_atomics(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                          const Execution& execution);

}  // namespace distr::cuda::sm90
