// SPDX-License-Identifier: Apache-2.0
// What must hold of a call's tensors, once the problem and the grouping are valid. Each throws Error(invalid_argument).
#pragma once

#include "kernel.h"

namespace distr {

void check(const Problem& problem, const Grouping& grouping, Device device, const GroupingTensors& tensors);
void check(const Problem& problem, const Grouping& grouping, Device device, const ForwardTensors& tensors);
void check(const Problem& problem, const Grouping& grouping, Device device, const BackwardTensors& tensors);

// Only what is read of Q, K, the mask and the order.
void check_scores_inputs(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors);

// Whether a call has nothing to write.
[[nodiscard]] inline bool is_empty(const Problem& problem, const GroupingTensors& /*tensors*/) noexcept {
  return problem.batch == 0 || problem.seq_q == 0;
}
[[nodiscard]] inline bool is_empty(const Problem& problem, const ForwardTensors& /*tensors*/) noexcept {
  return problem.batch == 0 || problem.seq_q == 0;
}
[[nodiscard]] inline bool is_empty(const Problem& problem, const BackwardTensors& tensors) noexcept {
  return tensors.d_mask == nullptr && (problem.batch == 0 || (problem.seq_q == 0 && problem.seq_k == 0));
}

}  // namespace distr
