// SPDX-License-Identifier: Apache-2.0
// The method in float64, one function for each equation, on one head at a time: the executable specification.
// Letters are the paper's: Q, K, V, P, l rows of a block, d columns, r groups.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "common/block.h"
#include "common/mask.h"
#include "distr/attention.h"

namespace distr::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A row-major matrix of doubles.
struct Matrix {
  Matrix(std::int64_t row_count, std::int64_t column_count)
      : rows(row_count), columns(column_count), values(static_cast<std::size_t>(row_count * column_count)) {}

  [[nodiscard]] double* row(std::int64_t i) noexcept { return values.data() + i * columns; }
  [[nodiscard]] const double* row(std::int64_t i) const noexcept { return values.data() + i * columns; }

  std::int64_t rows;
  std::int64_t columns;
  std::vector<double> values;
};

// Rows first .. first + rows - 1 of head h in batch b.
[[nodiscard]] Matrix load_rows(const void* data, DType dtype, const Strides& strides, std::int64_t b, std::int64_t h,
                               std::int64_t first, std::int64_t rows, std::int64_t columns);
void store_rows(const Matrix& matrix, void* data, DType dtype, const Strides& strides, std::int64_t b, std::int64_t h);

// hash(c): rank, in the Gray sequence, of the bits [sum_n R[n,t] Q_b[n,c] > 0] (Section 3.2).
[[nodiscard]] std::vector<std::uint32_t> hash_columns(const Matrix& q_block, std::uint64_t seed);

// The mean of column c over the first `keys` rows of K; of none: 0.
[[nodiscard]] double key_mean(const Matrix& k, std::int64_t keys, std::int64_t c);

// e_c = sum_n Q_b[n,c]^2 * sum_j (K[j,c] - mean_j K[:,c])^2 over the first `keys` rows of K.
[[nodiscard]] std::vector<double> energies(const Matrix& q_block, const Matrix& k, std::int64_t keys);

// What each column weighs under a strategy that keeps the heaviest; empty under another.
[[nodiscard]] std::vector<double> weights(Strategy strategy, const Matrix& q_block, const Matrix& k, std::int64_t keys);

// The order of a block: columns by descending weight, NaN and infinity first; under `lsh` by hash. Ties go to the lower
// column.
[[nodiscard]] std::vector<std::int32_t> order_columns(const Grouping& grouping, const Matrix& q_block, const Matrix& k,
                                                      std::int64_t keys);

// q_hat [l, r]: a group's sampled column or its mean.
[[nodiscard]] Matrix estimate(const Matrix& q_block, const common::Groups& groups, Estimator estimator);

// k_hat [Nk, r]: the sum of a group's columns of K.
[[nodiscard]] Matrix fuse(const Matrix& k, const common::Groups& groups);

// Where a row of scores lies in the problem.
struct RowPosition {
  std::int64_t b, h, i;
};

// What softcap makes of a score, softcap * tanh(x / softcap), and its derivative there.
[[nodiscard]] double cap(const Problem& problem, double x) noexcept;
[[nodiscard]] double cap_slope(const Problem& problem, double x) noexcept;

// s_j = cap(scale * (q_hat . k_hat_j + dropped)) + mask; -inf for hidden keys. `dropped`: what the means of the keys
// stand for.
void scores(const Problem& problem, const common::MaskView& mask, const RowPosition& position, const double* q_hat,
            const Matrix& k_hat, double dropped, std::vector<double>& s);

// p_j = exp(s_j) / sum_j exp(s_j); returns LSE = log sum_j exp(s_j). Every key hidden: p = 0, LSE = -inf.
double softmax(const std::vector<double>& s, std::vector<double>& p);

// The same p from scores and LSE, as backward has them; exact to |LSE| times the rounding of LSE.
void probabilities(const std::vector<double>& s, double lse, std::vector<double>& p);

// sum over columns.
[[nodiscard]] double dot(const double* x, const double* y, std::int64_t count) noexcept;

// sums += factor x, over columns.
void add_scaled(double factor, const double* x, std::int64_t count, double* sums) noexcept;

}  // namespace distr::reference
