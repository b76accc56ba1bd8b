// SPDX-License-Identifier: Apache-2.0
// Textbook gradients, and the check of a backward against them.
#include <functional>
#include <map>
#include <random>
#include <utility>

#include "support/memo.h"
#include "support/normal.h"
#include "support/textbook.h"

namespace distr::test {
namespace {

std::int64_t mask_index(const Mask& mask, const std::array<std::int64_t, 4>& position) {
  std::int64_t index = 0;
  for (int axis = 0; axis < mask.rank; ++axis) {
    const auto a = static_cast<std::size_t>(axis);
    const std::int64_t at = mask.shape[a] == 1 ? 0 : position[static_cast<std::size_t>(4 - mask.rank + axis)];
    index = index * mask.shape[a] + at;
  }
  return index;
}

std::int64_t mask_size(const Mask& mask) {
  std::int64_t size = 1;
  for (int axis = 0; axis < mask.rank; ++axis) {
    size *= mask.shape[static_cast<std::size_t>(axis)];
  }
  return size;
}

// A tensor with the problem's strides, which gives its elements as dense doubles.
struct Strided {
  Strided(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c, Strides s, DType dtype)
      : batch(b), heads(h), rows(n), columns(c), strides(s), buffer(extent(s, b, h, n, c), dtype) {}

  [[nodiscard]] std::int64_t index(std::int64_t row, std::int64_t c) const {
    return row / rows / heads * strides.batch + row / rows % heads * strides.head + row % rows * strides.row + c;
  }
  [[nodiscard]] std::vector<double> dense() const {
    std::vector<double> result;
    for (std::int64_t row = 0; row < batch * heads * rows; ++row) {
      for (std::int64_t c = 0; c < columns; ++c) {
        result.push_back(buffer.at(index(row, c)));
      }
    }
    return result;
  }
  void set(const std::vector<double>& values) {
    for (std::size_t n = 0; n < values.size(); ++n) {
      const auto at = static_cast<std::int64_t>(n);
      buffer.set(index(at / columns, at % columns), values[n]);
    }
  }

  std::int64_t batch, heads, rows, columns;
  Strides strides;
  Buffer buffer;
};

// The first `count` values of a seed, of which a thread draws each once.
const std::vector<double>& normals(std::uint64_t seed, std::size_t count) {
  struct Sequence {
    std::mt19937_64 random;
    Normal normal;
    std::vector<double> values;
  };
  thread_local std::map<std::uint64_t, Sequence> all;
  Sequence& drawn = all.try_emplace(seed, Sequence{std::mt19937_64(seed), {}, {}}).first->second;
  while (drawn.values.size() < count) {
    drawn.values.push_back(drawn.normal(drawn.random));
  }
  return drawn.values;
}

std::vector<double> random_values(std::size_t count, DType dtype, std::uint64_t seed) {
  const std::vector<double>& drawn = normals(seed, count);
  Buffer rounded(static_cast<std::int64_t>(count), dtype);
  std::vector<double> values(count);
  for (std::size_t n = 0; n < count; ++n) {
    rounded.set(static_cast<std::int64_t>(n), drawn[n]);
    values[n] = rounded.at(static_cast<std::int64_t>(n));
  }
  return values;
}

Gradients make_textbook_backward(const Instance& instance, const Result& forward, const Result& upstream,
                                 Precision precision, std::int64_t rotation) {
  const Problem& p = instance.test_case.problem;
  const Rounding round{precision, p.dtype};
  const bool sample = instance.test_case.grouping.estimator == Estimator::sample;
  const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  Gradients result;
  result.d_q.resize(size(p.batch * p.heads_q * p.seq_q * p.head_dim));
  result.d_k.resize(size(p.batch * p.heads_kv * p.seq_k * p.head_dim));
  result.d_v.resize(size(p.batch * p.heads_kv * p.seq_k * p.head_dim_v));
  result.d_mask.resize(size(mask_size(p.mask)));
  const auto add = [&](double& sum, double term) { sum = round.sum(sum + term); };
  TextbookRows rows(instance, round, rotation);
  for (std::int64_t n = 0; n < p.batch * p.heads_q * p.seq_q; ++n) {
    const TextbookRow row = rows.row(n);
    const double* d_o = upstream.o.data() + n * p.head_dim_v;
    double d = 0;                                            // D = rowsum(dO * O) - dLSE
    for (std::int64_t n_c = 0; n_c < p.head_dim_v; ++n_c) {  // in another order than dP, or what they share cancels
      const std::int64_t c = (n_c + rotation) % p.head_dim_v;
      add(d, d_o[c] * forward.o[size(n * p.head_dim_v + c)]);
    }
    add(d, -upstream.lse[size(n)]);
    std::vector<double> d_p(size(p.seq_k));
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      round.add(d_p.size(), d_o[c], rows.v_transposed.data() + c * p.seq_k, d_p.data());
    }
    // The columns that have a group, and the q_hat of every column.
    std::vector<std::int64_t> columns;
    std::vector<double> q_hat(size(p.head_dim));
    for (std::size_t g = 0; g < rows.groups.size(); ++g) {
      columns.insert(columns.end(), rows.groups[g].begin(), rows.groups[g].end());
      for (const std::int64_t column : rows.groups[g]) {
        q_hat[size(column)] = row.q_hat[g];
      }
    }
    std::vector<double> dq_hat(rows.groups.size());
    std::vector<double> dq_near(size(p.head_dim));
    double far = 0;  // the sum of dS over far keys
    for (std::int64_t j = 0; j < p.seq_k; ++j) {
      const double score = row.s[size(j)];
      if (score == -kInfinity || forward.lse[size(n)] == -kInfinity) {
        continue;
      }
      const double probability = round.sum(std::exp(round.sum(score - forward.lse[size(n)])));
      const std::int64_t key = (row.b * p.heads_kv + row.h_kv) * p.seq_k + j;
      round.add(size(p.head_dim_v), round.operand(probability), d_o, result.d_v.data() + key * p.head_dim_v);
      const double d_s = round.sum(probability * round.sum(d_p[size(j)] - d));
      if (p.mask.kind == MaskKind::additive) {
        add(result.d_mask[size(mask_index(p.mask, {row.b, row.h, row.i, j}))], d_s);
      }
      const double scaled = round.operand(round.sum(round.sum(d_s * row.slopes[size(j)]) * p.softmax_scale()));
      double* const d_k = result.d_k.data() + key * p.head_dim;
      if (row.is_near[size(j)] != 0) {
        round.add(dq_near.size(), scaled, rows.k.data() + size(j) * dq_near.size(), dq_near.data());
        round.add(dq_near.size(), scaled, row.q.data(), d_k);
        continue;
      }
      add(far, scaled);
      round.add(dq_hat.size(), scaled, rows.k_hat.data() + size(j) * dq_hat.size(), dq_hat.data());
      // One loop over all columns is several times as quick. It adds 0 to those without a group, their q_hat.
      if (columns.size() == q_hat.size() || std::isfinite(scaled)) {
        round.add(q_hat.size(), scaled, q_hat.data(), d_k);
        continue;
      }
      for (const std::int64_t column : columns) {
        add(d_k[column], scaled * q_hat[size(column)]);
      }
    }
    for (std::size_t g = 0; g < rows.groups.size(); ++g) {
      const std::size_t members = sample ? 1 : rows.groups[g].size();
      for (std::size_t member = 0; member < members; ++member) {
        result.d_q[size(n * p.head_dim + rows.groups[g][member])] = dq_hat[g] / static_cast<double>(members);
      }
    }
    for (std::size_t c = 0; c < dq_near.size(); ++c) {
      const double mean = rows.dropped[c] == 0 ? 0 : far * rows.dropped[c];  // also where `far` is NaN
      add(result.d_q[size(n * p.head_dim) + c], round.sum(dq_near[c] + mean));
    }
  }
  for (auto* values : {&result.d_q, &result.d_k, &result.d_v}) {
    for (double& value : *values) {
      value = round.operand(value);
    }
  }
  return result;
}

struct BackwardQuestion {
  bool operator==(const BackwardQuestion&) const = default;

  Question question;
  Result forward, upstream;
};

}  // namespace

Gradients textbook_backward(const Instance& instance, const Result& forward, const Result& upstream,
                            Precision precision, std::int64_t rotation) {
  thread_local Memo<BackwardQuestion, Gradients> memo;
  return memo.get({{instance, precision, rotation}, forward, upstream},
                  [&] { return make_textbook_backward(instance, forward, upstream, precision, rotation); });
}

namespace {

// The forward's results that the textbook's gradients are made of, by precision and rotation.
using Before = std::function<Result(Precision, std::int64_t)>;

// Judges what `backward` makes of O and LSE.
std::string judge_backward(Backward backward, const Instance& instance, const Result& forward, const Before& before,
                           double tolerated) {
  const Problem& p = instance.test_case.problem;
  Strided o(p.batch, p.heads_q, p.seq_q, p.head_dim_v, p.o, p.dtype);
  Strided d_o = o;
  Strided lse(p.batch, p.heads_q, p.seq_q, 1, {p.heads_q * p.seq_q, p.seq_q, 1}, p.lse_dtype());
  Strided d_lse = lse;
  o.set(forward.o);
  lse.set(forward.lse);
  const Result upstream{random_values(forward.o.size(), p.dtype, 5),
                        random_values(forward.lse.size(), p.lse_dtype(), 6)};
  d_o.set(upstream.o);
  d_lse.set(upstream.lse);
  Strided d_q(p.batch, p.heads_q, p.seq_q, p.head_dim, p.q, p.dtype);
  Strided d_k(p.batch, p.heads_kv, p.seq_k, p.head_dim, p.k, p.dtype);
  Strided d_v(p.batch, p.heads_kv, p.seq_k, p.head_dim_v, p.v, p.dtype);
  Buffer d_mask(mask_size(p.mask), p.lse_dtype());
  const bool additive = p.mask.kind == MaskKind::additive;
  Execution execution;
  execution.threads = 2;
  backward(p, instance.test_case.grouping,
           {instance.q_data(), instance.k_data(), instance.v_data(), instance.mask_data(), instance.order.data(),
            o.buffer.data(), lse.buffer.data(), d_o.buffer.data(), d_lse.buffer.data(), d_q.buffer.data(),
            d_k.buffer.data(), d_v.buffer.data(), additive ? d_mask.data() : nullptr, instance.key_means.data()},
           execution);
  for (const Buffer* buffer : std::initializer_list<const Buffer*>{&d_q.buffer, &d_k.buffer, &d_v.buffer, &d_mask}) {
    if (!buffer->canaries_intact()) {
      return "wrote beside an output";
    }
  }
  if (!kValuesAreJudged) {
    return "";
  }
  std::vector<double> mask_gradient;
  for (std::int64_t n = 0; additive && n < d_mask.count(); ++n) {
    mask_gradient.push_back(d_mask.at(n));
  }
  Gradients truth = textbook_backward(instance, before(Precision::float64, 0), upstream, Precision::float64);
  truth.d_mask.resize(mask_gradient.size());
  const Gradients got{d_q.dense(), d_k.dense(), d_v.dense(), mask_gradient};
  const std::pair<const char*, std::vector<double> Gradients::*> parts[] = {
      {"dQ: ", &Gradients::d_q}, {"dK: ", &Gradients::d_k}, {"dV: ", &Gradients::d_v}, {"dMask: ", &Gradients::d_mask}};
  std::array<double, 4> errors{};
  errors.fill(tolerated);
  std::string fault;
  for (std::int64_t rotation = 0; rotation < kPlainOrders; ++rotation) {
    Gradients plain =
        textbook_backward(instance, before(Precision::plain, rotation), upstream, Precision::plain, rotation);
    plain.d_mask.resize(mask_gradient.size());
    fault.clear();
    for (std::size_t n = 0; n < errors.size(); ++n) {
      const auto& [name, part] = parts[n];
      errors[n] = std::max(errors[n], largest_error(plain.*part, truth.*part));
      const std::string part_fault = judge(got.*part, truth.*part, errors[n], p.dtype);
      fault = fault.empty() && !part_fault.empty() ? name + part_fault : fault;
    }
    if (fault.empty()) {
      break;
    }
  }
  return fault;
}

}  // namespace

std::string check_backward(Backward backward, Instance& instance) {
  const Problem& p = instance.test_case.problem;
  Result forward = textbook(instance, Precision::float64);
  const auto round = [](std::vector<double>& values, DType dtype) {
    for (double& value : values) {
      value = Rounding{Precision::plain, dtype}.operand(value);
    }
  };
  round(forward.o, p.dtype);  // as a forward leaves them
  round(forward.lse, p.lse_dtype());
  return judge_backward(
      backward, instance, forward, [&](Precision, std::int64_t) { return forward; }, 0);
}

std::string check_own_backward(Forward forward, Backward backward, Instance& instance, double tolerated) {
  const Problem& p = instance.test_case.problem;
  forward(p, instance.test_case.grouping, instance.forward(), {});
  return judge_backward(
      backward, instance, written(p, instance.o, instance.lse),
      [&](Precision precision, std::int64_t rotation) { return textbook(instance, precision, rotation); }, tolerated);
}

}  // namespace distr::test
