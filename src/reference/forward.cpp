// SPDX-License-Identifier: Apache-2.0
// Grouping and forward in float64 from the equations. Allocates one head as doubles, never N x N.
#include <algorithm>
#include <numeric>

#include "common/parallel.h"
#include "common/sequence.h"
#include "reference/head_scores.h"

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
  const bool reads_keys = traits(grouping.strategy).reads_keys;
  const Matrix k = reads_keys ? load_k(problem, tensors.k, head) : Matrix(0, problem.head_dim);
  return order_columns(grouping, q_block, k, common::order_keys(problem, grouping, block));
}

// The rows of one head, 64 at a time, as they are skipped together.
void forward_head(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const Head& head) {
  HeadScores scores(problem, grouping, score_tensors(tensors), head);
  const Matrix v = load_v(problem, tensors.v, head);
  const std::int64_t head_index = head.b * problem.heads_q + head.h;
  Matrix o(problem.seq_q, problem.head_dim_v);
  std::vector<std::vector<double>> s;
  std::vector<double> p;
  for (std::int64_t first = 0; first < problem.seq_q; first += common::kSkipRows) {
    const std::int64_t rows = std::min(common::kSkipRows, problem.seq_q - first);
    s.resize(static_cast<std::size_t>(rows));
    if (grouping.skip > 0) {
      const Halves halves = scores.skipped_rows(first, s);
      if (tensors.halves != nullptr) {
        const std::int64_t at = head_index * common::num_skip_rows(problem) + first / common::kSkipRows;
        tensors.halves[2 * at] = halves.kept;
        tensors.halves[2 * at + 1] = halves.seen;
      }
    } else {
      for (std::int64_t n = 0; n < rows; ++n) {
        scores.row(first + n, s[static_cast<std::size_t>(n)]);
      }
    }
    for (std::int64_t n = 0; n < rows; ++n) {
      const std::int64_t i = first + n;
      const double lse = softmax(s[static_cast<std::size_t>(n)], p);
      for (std::int64_t j = 0; j < problem.seq_k; ++j) {
        const double p_j = p[static_cast<std::size_t>(j)];
        if (p_j != 0) {
          add_scaled(p_j, v.row(j), v.columns, o.row(i));
        }
      }
      if (tensors.lse != nullptr) {
        common::store(tensors.lse, problem.lse_dtype(), common::row_index(problem, head.b, head.h, i), lse);
      }
    }
  }
  store_rows(o, tensors.o, problem.dtype, problem.o, head.b, head.h);
}

// The means over the keys that a block's far scores keep of dropped columns (method, 8).
void write_key_means(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors) {
  for (std::int64_t index = 0; index < problem.batch * problem.heads_kv; ++index) {
    const std::int64_t b = index / problem.heads_kv;
    const std::int64_t h_kv = index % problem.heads_kv;
    const Matrix k = load_rows(tensors.k, problem.dtype, problem.k, b, h_kv, 0, problem.seq_k, problem.head_dim);
    for (std::int64_t block = 0; block < common::num_key_means(problem, grouping); ++block) {
      const std::int64_t keys = common::order_keys(problem, grouping, block);
      float* const means = tensors.key_means + common::key_means_at(problem, grouping, b, h_kv, block);
      for (std::int64_t c = 0; c < k.columns; ++c) {
        means[c] = static_cast<float>(key_mean(k, keys, c));
      }
    }
  }
}

}  // namespace

void run_grouping(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                  const Execution& execution) {
  if (common::has_key_means(grouping)) {
    write_key_means(problem, grouping, tensors);
  }
  if (traits(grouping.strategy).order == OrderSource::caller && !is_exact(grouping)) {
    return;
  }
  const std::int64_t blocks = common::num_blocks(problem, grouping);
  common::parallel_for(execution, problem.batch * problem.heads_q * blocks, [&](std::int64_t task, int) {
    const Head head = head_of(problem, task / blocks);
    const auto order = order_of_block(problem, grouping, tensors, head, task % blocks);
    std::copy(order.begin(), order.end(), tensors.order + task * problem.head_dim);
  });
}

void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution) {
  common::parallel_for(execution, problem.batch * problem.heads_q, [&](std::int64_t task, int) {
    const Head head = head_of(problem, task);
    common::with_sequence(problem, tensors, head.b,
                          [&](const Problem& own, const ForwardTensors& from, std::int64_t b) {
                            forward_head(own, grouping, from, {b, head.h, head.h_kv});
                          });
  });
}

}  // namespace distr::reference
