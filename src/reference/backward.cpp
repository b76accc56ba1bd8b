// SPDX-License-Identifier: Apache-2.0
// Backward in float64 (method, 3), the order held constant. Allocates one head as doubles, never N x N.
#include <array>

#include "common/gradient_strides.h"
#include "common/sequence.h"
#include "reference/head_scores.h"

namespace distr::reference {
namespace {

// The gradient of an additive mask, contiguous in the mask's own shape, summed over the axes that repeat.
class MaskGradient {
 public:
  // Without `wanted` it holds nothing, and must not be added to.
  MaskGradient(const Problem& problem, bool wanted) {
    if (!wanted) {
      return;
    }
    const auto rank = static_cast<std::size_t>(problem.mask.rank);
    std::int64_t stride = 1;
    for (std::size_t axis = rank; axis-- > 0;) {
      strides_[4 - rank + axis] = problem.mask.shape[axis] == 1 ? 0 : stride;
      stride *= problem.mask.shape[axis];
    }
    sum_.resize(static_cast<std::size_t>(stride));
  }
  void add(const RowPosition& at, std::int64_t j, double ds) {
    sum_[static_cast<std::size_t>(at.b * strides_[0] + at.h * strides_[1] + at.i * strides_[2] + j * strides_[3])] +=
        ds;
  }
  void store(void* data, DType dtype) const {
    for (std::size_t index = 0; index < sum_.size(); ++index) {
      common::store(data, dtype, static_cast<std::int64_t>(index), sum_[index]);
    }
  }

 private:
  std::array<std::int64_t, 4> strides_{};
  std::vector<double> sum_;
};

// Gradients of one KV head, summed over its query heads.
struct KvGradients {
  Matrix d_k, d_v;
};

// dQ of a group's columns: the sampled column takes all of dq_hat, or each takes its share of the mean.
void spread_dq(const common::Groups& groups, Estimator estimator, const double* dq_hat, double* d_q) {
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const std::int64_t members = estimator == Estimator::sample ? 1 : groups.size(g);
    for (std::int64_t member = 0; member < members; ++member) {
      d_q[groups.column(g, member)] = dq_hat[g] / static_cast<double>(members);
    }
  }
}

// dK of a group's columns: each takes all of dk_hat, for k_hat is their sum.
void spread_dk(const common::Groups& groups, const Matrix& dk_hat, Matrix& d_k) {
  for (std::int64_t j = 0; j < d_k.rows; ++j) {
    for (std::int64_t g = 0; g < groups.count; ++g) {
      for (std::int64_t member = 0; member < groups.size(g); ++member) {
        d_k.row(j)[groups.column(g, member)] += dk_hat.row(j)[g];
      }
    }
  }
}

void backward_head(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors, const Head& head,
                   KvGradients& kv, MaskGradient& d_mask) {
  const double scale = problem.softmax_scale();
  HeadScores scores(problem, grouping, score_tensors(tensors), head);
  const Matrix v = load_v(problem, tensors.v, head);
  const auto load_o = [&](const void* data) {
    return load_rows(data, problem.dtype, problem.o, head.b, head.h, 0, problem.seq_q, problem.head_dim_v);
  };
  const Matrix o = load_o(tensors.o);
  const Matrix d_o = load_o(tensors.d_o);
  Matrix d_q(problem.seq_q, problem.head_dim);
  Matrix dk_hat(problem.seq_k, problem.head_dim);
  std::vector<double> s;
  std::vector<double> p;
  for (std::int64_t i = 0; i < problem.seq_q; ++i) {
    const std::int64_t row = common::row_index(problem, head.b, head.h, i);
    scores.row(i, s);
    const common::Groups& groups = scores.groups();
    if (i % grouping.block == 0) {
      dk_hat = Matrix(problem.seq_k, groups.count);
    }
    probabilities(s, common::load(tensors.lse, problem.lse_dtype(), row), p);
    const double d_lse = tensors.d_lse == nullptr ? 0 : common::load(tensors.d_lse, problem.lse_dtype(), row);
    const double d = dot(d_o.row(i), o.row(i), o.columns) - d_lse;
    std::vector<double> dq_hat(static_cast<std::size_t>(groups.count));
    std::vector<double> dq_near(static_cast<std::size_t>(problem.head_dim));
    double ds_far = 0;
    for (std::int64_t j = 0; j < problem.seq_k; ++j) {
      const double p_j = p[static_cast<std::size_t>(j)];
      if (p_j == 0) {
        continue;
      }
      const double ds = p_j * (dot(d_o.row(i), v.row(j), v.columns) - d);
      add_scaled(p_j, d_o.row(i), v.columns, kv.d_v.row(j));
      const double d_product = scale * ds * scores.cap_slope(i, j);
      if (scores.is_near(j)) {
        add_scaled(d_product, scores.k().row(j), problem.head_dim, dq_near.data());
        add_scaled(d_product, scores.q_of(i), problem.head_dim, kv.d_k.row(j));
      } else {
        ds_far += d_product;
        add_scaled(d_product, scores.k_hat().row(j), groups.count, dq_hat.data());
        add_scaled(d_product, scores.q_hat_of(i), groups.count, dk_hat.row(j));
      }
      if (tensors.d_mask != nullptr) {
        d_mask.add({head.b, head.h, i}, j, ds);
      }
    }
    spread_dq(groups, grouping.estimator, dq_hat.data(), d_q.row(i));
    for (std::int64_t c = 0; c < problem.head_dim; ++c) {
      const double mean = scores.dropped_key(c);
      d_q.row(i)[c] += dq_near[static_cast<std::size_t>(c)] + (mean == 0 ? 0 : ds_far * mean);  // ds_far may be NaN
    }
    if ((i + 1) % grouping.block == 0 || i + 1 == problem.seq_q) {
      spread_dk(groups, dk_hat, kv.d_k);
    }
  }
  store_rows(d_q, tensors.d_q, problem.dtype, common::gradient_strides(problem).q, head.b, head.h);
}

// The query heads of KV head h_kv in batch entry b.
void backward_kv_head(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors, std::int64_t b,
                      std::int64_t h_kv, MaskGradient& d_mask) {
  const std::int64_t group = problem.heads_q / problem.heads_kv;
  KvGradients kv{Matrix(problem.seq_k, problem.head_dim), Matrix(problem.seq_k, problem.head_dim_v)};
  for (std::int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    backward_head(problem, grouping, tensors, {b, h, h_kv}, kv, d_mask);
  }
  const common::GradientStrides strides = common::gradient_strides(problem);
  store_rows(kv.d_k, tensors.d_k, problem.dtype, strides.k, b, h_kv);
  store_rows(kv.d_v, tensors.d_v, problem.dtype, strides.v, b, h_kv);
}

}  // namespace

void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& /*execution: one thread, for the mask's gradient is shared by all heads*/) {
  MaskGradient d_mask(problem, tensors.d_mask != nullptr);
  for (std::int64_t index = 0; index < problem.batch * problem.heads_kv; ++index) {
    common::with_sequence(problem, tensors, index / problem.heads_kv,
                          [&](const Problem& own, const BackwardTensors& from, std::int64_t b) {
                            backward_kv_head(own, grouping, from, b, index % problem.heads_kv, d_mask);
                          });
  }
  if (tensors.d_mask != nullptr) {
    d_mask.store(tensors.d_mask, problem.lse_dtype());
  }
}

}  // namespace distr::reference
