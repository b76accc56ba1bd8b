// SPDX-License-Identifier: Apache-2.0
// The CPU backend's operations. Each source is built once for each instruction set, and picks one at run time.
#pragma once

#include <cstddef>

#include "kernel.h"

namespace distr::cpu {

void run_grouping(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                  const Execution& execution);
std::size_t grouping_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);

void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution);
std::size_t forward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);

void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& execution);
std::size_t backward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);

}  // namespace distr::cpu
