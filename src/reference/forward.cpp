// SPDX-License-Identifier: Apache-2.0
// Grouping and forward in float64 from the equations. Allocates one head as doubles, never N x N.
#include <algorithm>
#include <numeric>

#include "common/parallel.h"
#include "reference/head.h"

namespace distr::reference {
namespace {

std::vector<std::int32_t> order_of_block(const Problem& problem, const Grouping& grouping,
                                         const GroupingTensors& tensors, const Head& head, std::int64_t block) {
  if (common::is_exact_block(grouping, block)) {
    std::vector<std::int32_t> identity(static_cast<std::size_t>(problem.head_dim));
    std::iota(identity.begin(), identity.end(), 0);
    return identity;
  }
  const Matrix q_block = load_q_block(problem, grouping, tensors.q, head, common::order_block(grouping, block));
  switch (grouping.strategy) {
    case Strategy::automatic:
    case Strategy::exact:
      break;  // resolved, and every block is exact
    case Strategy::lsh:
      return lsh_order(q_block, grouping.seed);
    case Strategy::energy:
      return energy_order(q_block, load_k(problem, tensors.k, head), common::order_keys(problem, grouping, block));
  }
  return {};
}

void forward_head(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const Head& head) {
  const common::MaskView mask(problem.mask, tensors.mask);
  const Matrix k = load_k(problem, tensors.k, head);
  const Matrix v = load_v(problem, tensors.v, head);
  Matrix o(problem.seq_q, problem.head_dim_v);
  std::vector<double> s;
  std::vector<double> p;
  for (std::int64_t block = 0; block < common::num_blocks(problem, grouping); ++block) {
    const auto groups = common::block_groups(problem, grouping, tensors.order, head.b, head.h, block);
    const Matrix q_hat = estimate(load_q_block(problem, grouping, tensors.q, head, block), groups, grouping.estimator);
    const Matrix k_hat = fuse(k, groups);
    for (std::int64_t n = 0; n < q_hat.rows; ++n) {
      const std::int64_t i = block * grouping.block + n;
      scores(problem, mask, {head.b, head.h, i}, q_hat.row(n), k_hat, s);
      const double lse = softmax(s, p);
      for (std::int64_t j = 0; j < problem.seq_k; ++j) {
        const double p_j = p[static_cast<std::size_t>(j)];
        for (std::int64_t c = 0; p_j != 0 && c < v.columns; ++c) {
          o.row(i)[c] += p_j * v.row(j)[c];
        }
      }
      if (tensors.lse != nullptr) {
        common::store(tensors.lse, problem.lse_dtype(), (head.b * problem.heads_q + head.h) * problem.seq_q + i, lse);
      }
    }
  }
  store_rows(o, tensors.o, problem.dtype, problem.o, head.b, head.h);
}

}  // namespace

void run_grouping(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                  const Execution& execution) {
  const std::int64_t blocks = common::num_blocks(problem, grouping);
  common::parallel_for(execution, problem.batch * problem.heads_q * blocks, [&](std::int64_t task, int) {
    const Head head(problem, task / blocks);
    const auto order = order_of_block(problem, grouping, tensors, head, task % blocks);
    std::copy(order.begin(), order.end(), tensors.order + task * problem.head_dim);
  });
}

void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution) {
  common::parallel_for(execution, problem.batch * problem.heads_q,
                       [&](std::int64_t task, int) { forward_head(problem, grouping, tensors, Head(problem, task)); });
}

}  // namespace distr::reference
