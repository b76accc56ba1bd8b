// SPDX-License-Identifier: Apache-2.0
// The plain kernels: fp32 arithmetic without tensor cores, for every shape, mask and grouping of f16, bf16 and f32.
// They are what the others are read and judged against, and what serves fp32.
#pragma once

#include <cstddef>
#include <string>

#include "kernel.h"

namespace distr::cuda::plain {

// Refuses f64, and more tiles than a grid has blocks.
std::string supports(const Problem& problem, const Grouping& grouping);

std::size_t forward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution);

std::size_t backward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& execution);

}  // namespace distr::cuda::plain
