// SPDX-License-Identifier: Apache-2.0
#include "reference/equations.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/projection.h"

namespace distr::reference {
namespace {

std::int64_t row_start(const Strides& strides, std::int64_t b, std::int64_t h, std::int64_t i) {
  return b * strides.batch + h * strides.head + i * strides.row;
}

template <class Less>
std::vector<std::int32_t> sorted_columns(std::int64_t d, Less less) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(d));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), less);
  return order;
}

}  // namespace

Matrix load_rows(const void* data, DType dtype, const Strides& strides, std::int64_t b, std::int64_t h,
                 std::int64_t first, std::int64_t rows, std::int64_t columns) {
  Matrix result(rows, columns);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t start = row_start(strides, b, h, first + i);
    for (std::int64_t c = 0; c < columns; ++c) {
      result.row(i)[c] = common::load(data, dtype, start + c);
    }
  }
  return result;
}

void store_rows(const Matrix& matrix, void* data, DType dtype, const Strides& strides, std::int64_t b, std::int64_t h) {
  for (std::int64_t i = 0; i < matrix.rows; ++i) {
    const std::int64_t start = row_start(strides, b, h, i);
    for (std::int64_t c = 0; c < matrix.columns; ++c) {
      common::store(data, dtype, start + c, matrix.row(i)[c]);
    }
  }
}

std::vector<std::uint32_t> hash_columns(const Matrix& q_block, std::uint64_t seed) {
  Matrix projection(common::kHashBits, q_block.columns);  // R^T Q_b
  for (std::int64_t n = 0; n < q_block.rows; ++n) {
    const auto r = common::projection_row(seed, n);
    for (std::int64_t t = 0; t < common::kHashBits; ++t) {
      for (std::int64_t c = 0; c < q_block.columns; ++c) {
        projection.row(t)[c] += static_cast<double>(r[static_cast<std::size_t>(t)]) * q_block.row(n)[c];
      }
    }
  }
  std::vector<std::uint32_t> hashes(static_cast<std::size_t>(q_block.columns));
  for (std::int64_t c = 0; c < q_block.columns; ++c) {
    std::uint32_t code = 0;
    for (std::int64_t t = 0; t < common::kHashBits; ++t) {
      code |= static_cast<std::uint32_t>(projection.row(t)[c] > 0) << t;
    }
    hashes[static_cast<std::size_t>(c)] = common::gray_rank(code);
  }
  return hashes;
}

double key_mean(const Matrix& k, std::int64_t keys, std::int64_t c) {
  double mean = 0;
  for (std::int64_t j = 0; j < keys; ++j) {
    mean += k.row(j)[c] / static_cast<double>(keys);
  }
  return mean;
}

std::vector<double> energies(const Matrix& q_block, const Matrix& k, std::int64_t keys) {
  std::vector<double> result(static_cast<std::size_t>(q_block.columns));
  for (std::int64_t c = 0; c < q_block.columns; ++c) {
    double q_square = 0;
    for (std::int64_t n = 0; n < q_block.rows; ++n) {
      q_square += q_block.row(n)[c] * q_block.row(n)[c];
    }
    const double mean = key_mean(k, keys, c);
    double k_deviation = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
      k_deviation += (k.row(j)[c] - mean) * (k.row(j)[c] - mean);
    }
    result[static_cast<std::size_t>(c)] = q_square * k_deviation;
  }
  return result;
}

std::vector<double> weights(Strategy strategy, const Matrix& q_block, const Matrix& k, std::int64_t keys) {
  switch (strategy) {
    case Strategy::automatic:
    case Strategy::exact:
    case Strategy::lsh:
    case Strategy::given:
      break;
    case Strategy::energy:
      return energies(q_block, k, keys);
  }
  return {};
}

std::vector<std::int32_t> order_columns(const Grouping& grouping, const Matrix& q_block, const Matrix& k,
                                        std::int64_t keys) {
  if (grouping.strategy == Strategy::lsh) {
    const std::vector<std::uint32_t> hash = hash_columns(q_block, grouping.seed);
    return sorted_columns(q_block.columns, [&](std::int32_t a, std::int32_t b) {
      return hash[static_cast<std::size_t>(a)] < hash[static_cast<std::size_t>(b)];
    });
  }
  std::vector<double> weight = weights(grouping.strategy, q_block, k, keys);
  if (weight.empty()) {
    return {};  // every block is exact, or the caller gives the order
  }
  for (double& w : weight) {
    w = std::isnan(w) ? kInfinity : w;
  }
  return sorted_columns(q_block.columns, [&](std::int32_t a, std::int32_t b) {
    return weight[static_cast<std::size_t>(a)] > weight[static_cast<std::size_t>(b)];
  });
}

Matrix estimate(const Matrix& q_block, const common::Groups& groups, Estimator estimator) {
  Matrix q_hat(q_block.rows, groups.count);
  for (std::int64_t n = 0; n < q_block.rows; ++n) {
    for (std::int64_t g = 0; g < groups.count; ++g) {
      double sum = 0;
      const std::int64_t members = estimator == Estimator::sample ? 1 : groups.size(g);
      for (std::int64_t member = 0; member < members; ++member) {
        sum += q_block.row(n)[groups.column(g, member)];
      }
      q_hat.row(n)[g] = sum / static_cast<double>(members);
    }
  }
  return q_hat;
}

Matrix fuse(const Matrix& k, const common::Groups& groups) {
  Matrix k_hat(k.rows, groups.count);
  for (std::int64_t j = 0; j < k.rows; ++j) {
    for (std::int64_t g = 0; g < groups.count; ++g) {
      for (std::int64_t member = 0; member < groups.size(g); ++member) {
        k_hat.row(j)[g] += k.row(j)[groups.column(g, member)];
      }
    }
  }
  return k_hat;
}

double cap(const Problem& problem, double x) noexcept {
  return problem.softcap == 0 ? x : problem.softcap * std::tanh(x / problem.softcap);
}

double cap_slope(const Problem& problem, double x) noexcept {
  const double t = problem.softcap == 0 ? 0 : std::tanh(x / problem.softcap);
  return 1 - t * t;
}

void scores(const Problem& problem, const common::MaskView& mask, const RowPosition& position, const double* q_hat,
            const Matrix& k_hat, double dropped, std::vector<double>& s) {
  s.assign(static_cast<std::size_t>(problem.seq_k), -kInfinity);
  const double scale = problem.softmax_scale();
  const common::KeySpan visible = common::visible_keys(problem, position.i);
  for (std::int64_t j = visible.first; j < visible.end; ++j) {
    const double bias = mask(position.b, position.h, position.i, j);
    if (bias != -kInfinity) {
      const double product = dot(q_hat, k_hat.row(j), k_hat.columns) + dropped;
      s[static_cast<std::size_t>(j)] = cap(problem, scale * product) + bias;
    }
  }
}

double softmax(const std::vector<double>& s, std::vector<double>& p) {
  p.assign(s.size(), 0);
  double m = -kInfinity;
  for (const double value : s) {
    m = std::isnan(value) || value > m ? value : m;
  }
  if (m == -kInfinity) {
    return m;
  }
  double sum = 0;
  for (std::size_t j = 0; j < s.size(); ++j) {
    p[j] = s[j] == -kInfinity ? 0 : std::exp(s[j] - m);
    sum += p[j];
  }
  for (double& value : p) {
    value /= sum;
  }
  return m + std::log(sum);
}

void probabilities(const std::vector<double>& s, double lse, std::vector<double>& p) {
  p.assign(s.size(), 0);
  if (lse == -kInfinity) {
    return;
  }
  for (std::size_t j = 0; j < s.size(); ++j) {
    p[j] = s[j] == -kInfinity ? 0 : std::exp(s[j] - lse);
  }
}

// By iterators, not indices, of which UndefinedBehaviorSanitizer has half as much to check.
double dot(const double* x, const double* y, std::int64_t count) noexcept {
  return std::inner_product(x, x + count, y, 0.0);
}

void add_scaled(double factor, const double* x, std::int64_t count, double* sums) noexcept {
  for (const double* const end = x + count; x != end; ++x, ++sums) {
    *sums += factor * *x;
  }
}

}  // namespace distr::reference
