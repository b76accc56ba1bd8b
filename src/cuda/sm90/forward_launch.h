// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_90a forward kernel: what it takes, its workspace, and what runs before it.
#pragma once

#include <cstddef>
#include <string>

#include "distr/attention.h"

namespace distr::cuda::sm90 {

// Exact attention, and one grouping for the whole sequence.
std::string forward_supports(const Problem& problem, const Grouping& grouping);
// Groupings of blocks of their own.
std::string forward_blocks_supports(const Problem& problem, const Grouping& grouping);
std::size_t forward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution);

}  // namespace distr::cuda::sm90
