// SPDX-License-Identifier: Apache-2.0
// One query head's inputs in float64, and the operations that src/reference offers.
#pragma once

#include "kernel.h"
#include "reference/equations.h"

namespace distr::reference {

// One query head and the KV head it reads.
struct Head {
  std::int64_t b, h, h_kv;
};

[[nodiscard]] inline Head head_of(const Problem& problem, std::int64_t index) {
  const std::int64_t h = index % problem.heads_q;
  return {index / problem.heads_q, h, h / (problem.heads_q / problem.heads_kv)};
}

[[nodiscard]] inline Matrix load_q_block(const Problem& problem, const Grouping& grouping, const void* q,
                                         const Head& head, std::int64_t block) {
  return load_rows(q, problem.dtype, problem.q, head.b, head.h, block * grouping.block,
                   common::block_rows(problem, grouping, block), problem.head_dim);
}

[[nodiscard]] inline Matrix load_k(const Problem& problem, const void* k, const Head& head) {
  return load_rows(k, problem.dtype, problem.k, head.b, head.h_kv, 0, problem.seq_k, problem.head_dim);
}

[[nodiscard]] inline Matrix load_v(const Problem& problem, const void* v, const Head& head) {
  return load_rows(v, problem.dtype, problem.v, head.b, head.h_kv, 0, problem.seq_k, problem.head_dim_v);
}

void run_grouping(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                  const Execution& execution);
void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution);
void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& execution);

}  // namespace distr::reference
