// SPDX-License-Identifier: Apache-2.0
#include "error_trials.h"

#include <algorithm>
#include <cmath>

#include "distr/attention.h"

namespace distr::cli {
namespace {

std::mt19937_64 generator_of(std::uint64_t seed, std::int64_t rows, std::int64_t head_dim) {
  std::seed_seq sequence{seed & 0xffffffffU, seed >> 32, static_cast<std::uint64_t>(rows),
                         static_cast<std::uint64_t>(head_dim)};
  return std::mt19937_64(sequence);
}

// a b^T of row-major [rows, columns] matrices.
std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b, std::size_t rows,
                            std::size_t columns) {
  std::vector<double> result(rows * rows);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < rows; ++j) {
      double sum = 0;
      for (std::size_t c = 0; c < columns; ++c) sum += a[i * columns + c] * b[j * columns + c];
      result[i * rows + j] = sum;
    }
  }
  return result;
}

// The columns of one group: entries first .. last - 1 of a block's order.
struct Group {
  const std::int32_t* first;
  const std::int32_t* last;
};

double sum_of(const float* row, const Group& group) {
  double sum = 0;
  for (const std::int32_t* column = group.first; column != group.last; ++column) {
    sum += static_cast<double>(row[*column]);
  }
  return sum;
}

double estimate(const float* row, const Group& group, Estimator estimator) {
  if (estimator == Estimator::sample) return static_cast<double>(row[*group.first]);
  return sum_of(row, group) / static_cast<double>(group.last - group.first);
}

}  // namespace

ErrorTrials::ErrorTrials(std::int64_t rows, std::int64_t head_dim, std::uint64_t seed, Projections projections)
    : rows_(rows),
      head_dim_(head_dim),
      projections_(projections),
      generator_(generator_of(seed, rows, head_dim)),
      q_(static_cast<std::size_t>(rows * head_dim)),
      k_(q_.size()),
      projection_seed_(generator_()) {}

void ErrorTrials::draw() {
  // 24 bits, which fp32 holds: the standard's distributions differ between standard libraries.
  const auto uniform = [this] { return static_cast<float>(generator_() >> 40) * 0x1p-24F; };
  std::generate(q_.begin(), q_.end(), uniform);
  std::generate(k_.begin(), k_.end(), uniform);
  if (projections_ == Projections::fresh) projection_seed_ = generator_();
  exact_ = product({q_.begin(), q_.end()}, {k_.begin(), k_.end()}, static_cast<std::size_t>(rows_),
                   static_cast<std::size_t>(head_dim_));
}

std::vector<std::vector<double>> ErrorTrials::approximate(const ErrorSetting& setting,
                                                          const std::vector<Estimator>& estimators) const {
  Problem problem;
  problem.seq_q = problem.seq_k = rows_;
  problem.head_dim = problem.head_dim_v = head_dim_;
  problem = contiguous(problem);
  Grouping grouping;
  grouping.strategy = Strategy::lsh;
  grouping.group_size = setting.group_size;
  grouping.block = setting.block;
  grouping.seed = projection_seed_;
  const auto groups = static_cast<std::size_t>(num_groups(problem, grouping));
  const auto rows = static_cast<std::size_t>(rows_), block = static_cast<std::size_t>(setting.block);
  const auto head_dim = static_cast<std::size_t>(head_dim_), size = static_cast<std::size_t>(setting.group_size);
  std::vector<std::int32_t> order((rows + block - 1) / block * head_dim);
  Execution execution;
  execution.threads = 1;  // a trial is small
  make_grouping(problem, grouping, {q_.data(), k_.data(), order.data()}, execution);

  std::vector<std::vector<double>> scores(estimators.size(), std::vector<double>(rows * rows, 0.0));
  for (std::size_t i = 0; i < rows; ++i) {
    const std::int32_t* const columns = order.data() + i / block * head_dim;
    for (std::size_t g = 0; g < groups; ++g) {
      const Group group{columns + g * size, columns + std::min((g + 1) * size, head_dim)};
      std::vector<double> q_hat(estimators.size());
      for (std::size_t e = 0; e < q_hat.size(); ++e) q_hat[e] = estimate(&q_[i * head_dim], group, estimators[e]);
      for (std::size_t j = 0; j < rows; ++j) {
        const double k_hat = sum_of(&k_[j * head_dim], group);
        for (std::size_t e = 0; e < q_hat.size(); ++e) scores[e][i * rows + j] += q_hat[e] * k_hat;
      }
    }
  }
  return scores;
}

ErrorStatistics statistics_of(const std::vector<double>& exact, const std::vector<double>& approximate) {
  double difference = 0, relative = 0, sum = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    difference += approximate[i] - exact[i];
    relative += std::fabs(approximate[i] - exact[i]) / exact[i];
    sum += exact[i];
  }
  return {100 * std::fabs(difference) / sum, 100 * relative / static_cast<double>(exact.size())};
}

}  // namespace distr::cli
