// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_80 backwards: what they take, their workspace, and what runs before their kernels.
#pragma once

#include <cstddef>
#include <string>

#include "distr/attention.h"

namespace distr::cuda::sm80 {

std::string backward_supports(const Problem& problem, const Grouping& grouping);
std::size_t backward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& execution);

// The same problems, with dQ summed by atomic additions: quicker, but not the same bits in every run.
std::size_t backward_atomics_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_backward_atomics(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                          const Execution& execution);

}  // namespace distr::cuda::sm80
