// SPDX-License-Identifier: Apache-2.0
#include "support/oracle.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "support/memo.h"
#include "support/textbook.h"

namespace distr::test {
namespace {

std::vector<double> transposed(const std::vector<double>& matrix, std::size_t columns) {
  const std::size_t rows = matrix.size() / columns;
  std::vector<double> result(matrix.size());
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < columns; ++column) {
      result[column * rows + row] = matrix[row * columns + column];
    }
  }
  return result;
}

}  // namespace

// Most of the textbook's time passes here. Neither instruction set fuses the two operations: their bits are the same.
#if defined(__x86_64__)
[[gnu::target_clones("avx2", "default")]]
#endif
void add_products(std::size_t count, double factor, const double* __restrict values, double* __restrict sums) {
  for (std::size_t n = 0; n < count; ++n) {
    sums[n] += factor * values[n];
  }
}

#if defined(__x86_64__)
[[gnu::target_clones("avx2", "default")]]
#endif
void add_products_rounded(std::size_t count, double factor, const double* __restrict values, double* __restrict sums) {
  for (std::size_t n = 0; n < count; ++n) {
    sums[n] = static_cast<float>(sums[n] + factor * values[n]);
  }
}

void TextbookRows::read_keys(const TextbookRow& row) {
  const Problem& p = instance_.test_case.problem;
  const std::int64_t head = row.b * p.heads_kv + row.h_kv;
  if (head == read_) {
    return;
  }
  read_ = head;
  k.clear();
  v.clear();
  const void* const keys = instance_.k_data();
  const void* const values = instance_.v_data();
  for (std::int64_t j = 0; j < p.seq_k; ++j) {
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
      k.push_back(element(keys, p.dtype, p.k, row.b, row.h_kv, j, c));
    }
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      v.push_back(element(values, p.dtype, p.v, row.b, row.h_kv, j, c));
    }
  }
  k_transposed = transposed(k, static_cast<std::size_t>(p.head_dim));
  v_transposed = transposed(v, static_cast<std::size_t>(p.head_dim_v));
}

void TextbookRows::fuse(const TextbookRow& row) {
  const Problem& p = instance_.test_case.problem;
  const Grouping& grouping = instance_.test_case.grouping;
  groups = groups_of(instance_, row.b, row.h, row.i);
  read_keys(row);
  k_hat.clear();
  for (std::int64_t j = 0; j < p.seq_k; ++j) {
    for (const auto& group : groups) {
      double sum = 0;
      for (const std::int64_t column : group) {
        sum = round_.sum(sum + k[static_cast<std::size_t>(j * p.head_dim + column)]);
      }
      k_hat.push_back(group.size() == 1 ? sum : round_.operand(sum));
    }
  }
  k_hat_transposed = transposed(k_hat, groups.size());
  dropped.assign(static_cast<std::size_t>(p.head_dim), 0);
  if (!instance_.key_means.empty() && static_cast<std::int64_t>(groups.size()) < p.head_dim) {
    const std::int64_t means = grouping.order_from == OrderFrom::previous ? ceil_div(p.seq_q, grouping.block) : 1;
    const std::int64_t block = means == 1 ? 0 : row.i / grouping.block;
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
      const auto at = static_cast<std::size_t>(((row.b * p.heads_kv + row.h_kv) * means + block) * p.head_dim + c);
      dropped[static_cast<std::size_t>(c)] = static_cast<double>(instance_.key_means[at]);
    }
    for (const auto& group : groups) {
      for (const std::int64_t column : group) {
        dropped[static_cast<std::size_t>(column)] = 0;
      }
    }
  }
}

// q k^T by columns: k_columns is [columns of q, Nk].
std::vector<double> TextbookRows::products(const std::vector<double>& q, const std::vector<double>& k_columns) const {
  std::vector<double> result(static_cast<std::size_t>(instance_.test_case.problem.seq_k));
  for (std::size_t n_g = 0; n_g < q.size(); ++n_g) {  // outside: the sums of many keys run side by side
    const std::size_t g = (n_g + static_cast<std::size_t>(rotation_)) % q.size();
    round_.add(result.size(), q[g], k_columns.data() + g * result.size(), result.data());
  }
  return result;
}

// Scales, caps, and adds the mask.
void TextbookRows::finish_scores(TextbookRow& row, std::vector<double>& s) const {
  const Problem& p = instance_.test_case.problem;
  const double scale = round_.sum(p.softmax_scale());
  row.slopes.assign(s.size(), 1);
  for (std::size_t j = 0; j < s.size(); ++j) {
    const double bias = mask_at(instance_, row.b, row.h, row.i, static_cast<std::int64_t>(j));
    double score = round_.sum(s[j] * scale);
    if (p.softcap != 0) {
      const double t = round_.sum(std::tanh(round_.sum(score / p.softcap)));
      row.slopes[j] = round_.sum(1 - t * t);
      score = round_.sum(p.softcap * t);
    }
    s[j] = bias == -kInfinity ? -kInfinity : round_.sum(score + bias);
  }
}

TextbookRow TextbookRows::unskipped_row(std::int64_t n) {
  const Problem& p = instance_.test_case.problem;
  const Grouping& grouping = instance_.test_case.grouping;
  TextbookRow row;
  row.i = n % p.seq_q;
  row.h = n / p.seq_q % p.heads_q;
  row.b = n / p.seq_q / p.heads_q;
  row.h_kv = row.h * p.heads_kv / p.heads_q;
  const std::int64_t block = n / p.seq_q * p.seq_q + row.i / grouping.block;
  if (block != fused_) {
    fuse(row);
    fused_ = block;
  }
  const bool is_exact = static_cast<std::int64_t>(groups.size()) == p.head_dim;
  for (std::int64_t c = 0; c < p.head_dim; ++c) {
    row.q.push_back(element(instance_.q_data(), p.dtype, p.q, row.b, row.h, row.i, c));
  }
  for (const auto& group : groups) {
    double sum = 0;
    for (const std::int64_t column : group) {
      sum = round_.sum(sum + row.q[static_cast<std::size_t>(column)]);
    }
    const double first = row.q[static_cast<std::size_t>(group[0])];
    const bool sample = grouping.estimator == Estimator::sample;
    const double estimate = sample ? first : round_.sum(sum / static_cast<double>(group.size()));
    row.q_hat.push_back(is_exact ? round_.operand(estimate) : round_.estimate(estimate, p.softmax_scale()));
  }
  row.s = products(row.q_hat, k_hat_transposed);
  row.is_near.resize(row.s.size());
  if (grouping.window.has_value() || grouping.sinks > 0) {
    const std::vector<double> exact = products(row.q, k_transposed);
    double mean = 0;
    for (std::size_t c = 0; c < dropped.size(); ++c) {
      mean = round_.sum(mean + row.q[c] * dropped[c]);
    }
    for (std::size_t j = 0; j < row.s.size(); ++j) {
      row.is_near[j] = is_near(instance_, row.i, static_cast<std::int64_t>(j)) ? 1 : 0;
      row.s[j] = row.is_near[j] != 0 ? exact[j] : round_.sum(row.s[j] + mean);
    }
  }
  finish_scores(row, row.s);
  return row;
}

TextbookRow TextbookRows::row(std::int64_t n) {
  const Problem& p = instance_.test_case.problem;
  const Grouping& grouping = instance_.test_case.grouping;
  TextbookRow row = unskipped_row(n);
  if (grouping.skip == 0) {
    return row;
  }
  const std::int64_t first = n - row.i % 64;
  if (first != decided_) {
    decide(first, std::min(first + 64, n - row.i + p.seq_q));
    decided_ = first;
  }
  std::vector<double> exact;
  if (grouping.finish) {
    exact = products(row.q, k_transposed);
    finish_scores(row, exact);
  }
  for (std::size_t j = 0; j < row.s.size(); ++j) {
    if (row.is_near[j] == 0 && skipped_.kept[j / 64] == 0) {
      row.s[j] = -kInfinity;
    } else if (grouping.finish) {
      row.s[j] = exact[j];
    }
  }
  return row;
}

namespace {

Result make_textbook(const Instance& instance, Precision precision, std::int64_t rotation) {
  const Problem& p = instance.test_case.problem;
  const Rounding round{precision, p.dtype};
  TextbookRows rows(instance, round, rotation);
  Result result;
  const bool skips = instance.test_case.grouping.skip > 0;
  for (std::int64_t n = 0; n < p.batch * p.heads_q * p.seq_q; ++n) {
    const TextbookRow row = rows.row(n);
    if (skips) {
      result.is_close.push_back(rows.skipped().is_close ? 1 : 0);
    }
    if (skips && row.i % 64 == 0) {
      for (const auto* marks : {&rows.skipped().kept, &rows.skipped().seen}) {
        result.halves.push_back(static_cast<std::int32_t>(std::count(marks->begin(), marks->end(), 1)));
      }
    }
    double maximum = -kInfinity;
    for (const double score : row.s) {
      maximum = std::isnan(score) || score > maximum ? score : maximum;
    }
    std::vector<double> o(static_cast<std::size_t>(p.head_dim_v));
    double sum = 0;
    for (std::int64_t j = 0; j < p.seq_k && maximum != -kInfinity; ++j) {
      if (row.s[static_cast<std::size_t>(j)] == -kInfinity) {
        continue;
      }
      const double weight = round.sum(std::exp(round.sum(row.s[static_cast<std::size_t>(j)] - maximum)));
      sum = round.sum(sum + weight);
      const double rounded = round.operand(weight);
      const double* const values = rows.v.data() + j * p.head_dim_v;
      if (weight != 0) {
        round.add(o.size(), rounded, values, o.data());
      }
    }
    for (const double value : o) {
      result.o.push_back(maximum == -kInfinity ? 0 : round.operand(value / sum));
    }
    result.lse.push_back(maximum == -kInfinity ? -kInfinity : round.sum(maximum + std::log(sum)));
  }
  return result;
}

}  // namespace

Result textbook(const Instance& instance, Precision precision, std::int64_t rotation) {
  thread_local Memo<Question, Result> memo;
  return memo.get({instance, precision, rotation}, [&] { return make_textbook(instance, precision, rotation); });
}

Result written(const Problem& p, const Buffer& o, const Buffer& lse) {
  Result result;
  for (std::int64_t row = 0; row < p.batch * p.heads_q * p.seq_q; ++row) {
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      result.o.push_back(
          element(o.data(), p.dtype, p.o, row / p.seq_q / p.heads_q, row / p.seq_q % p.heads_q, row % p.seq_q, c));
    }
    result.lse.push_back(lse.at(row));
  }
  return result;
}

double largest_error(const std::vector<double>& values, const std::vector<double>& truth) {
  double largest = 0;
  for (std::size_t n = 0; n < values.size(); ++n) {
    if (std::isfinite(truth[n]) && std::isfinite(values[n])) {
      largest = std::max(largest, std::abs(values[n] - truth[n]));
    }
  }
  return largest;
}

std::string judge(const std::vector<double>& got, const std::vector<double>& truth, double plain_error, DType dtype) {
  std::ostringstream message;
  message.precision(9);
  if (got.size() != truth.size()) {
    message << got.size() << " values, expected " << truth.size();
    return message.str();
  }
  double eps = 0;
  switch (dtype) {
    case DType::f16:
      eps = 0x1p-11;
      break;
    case DType::bf16:
      eps = 0x1p-8;
      break;
    case DType::f32:
      eps = 0x1p-24;
      break;
    case DType::f64:
      eps = 0x1p-50;  // the reference's sums are as long as the plain ones
      break;
  }
  double largest = 0;
  double worst = -1;
  std::size_t worst_index = 0;
  for (std::size_t n = 0; n < got.size(); ++n) {
    const bool same_kind = std::isnan(got[n]) == std::isnan(truth[n]) && std::isinf(got[n]) == std::isinf(truth[n]);
    if (!same_kind || (std::isinf(truth[n]) && got[n] != truth[n])) {
      message << "index " << n << ": " << got[n] << ", expected " << truth[n];
      return message.str();
    }
    if (!std::isfinite(truth[n])) {
      continue;
    }
    largest = std::max(largest, std::abs(truth[n]));
    if (std::abs(got[n] - truth[n]) > worst) {
      worst = std::abs(got[n] - truth[n]);
      worst_index = n;
    }
  }
  const double bound = 2 * plain_error + 4 * eps * largest;
  if (worst > bound) {
    message << "index " << worst_index << ": " << got[worst_index] << ", expected " << truth[worst_index] << ", error "
            << worst << ", allowed " << bound;
  }
  return message.str();
}

}  // namespace distr::test
