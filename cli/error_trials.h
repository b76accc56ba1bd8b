// SPDX-License-Identifier: Apache-2.0
// The paper's experiment on the errors of S_hat: uniform random Q and K, grouped by LSH, in many trials.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "distr/grouping.h"

namespace distr::cli {

struct ErrorSetting {
  std::int64_t block;       // l
  std::int64_t group_size;  // G
};

// With `shared`, all trials have the same projection, as in the authors' script; the means then depend on that one.
enum class Projections : std::uint8_t { fresh, shared };

// S = Q K^T (the scale cancels in ratios) of Q and K ~ U(0, 1), [rows, head_dim], and S_hat by `lsh`, in float64.
class ErrorTrials {
 public:
  // The trials are a function of the arguments.
  ErrorTrials(std::int64_t rows, std::int64_t head_dim, std::uint64_t seed, Projections projections);

  // Draws the next Q, K and seed of the projections.
  void draw();

  [[nodiscard]] const std::vector<double>& exact() const { return exact_; }  // [rows, rows]

  // S_hat [rows, rows] of each of the estimators, which share the groups.
  [[nodiscard]] std::vector<std::vector<double>> approximate(const ErrorSetting& setting,
                                                             const std::vector<Estimator>& estimators) const;

 private:
  std::int64_t rows_, head_dim_;
  Projections projections_;
  std::mt19937_64 generator_;
  std::vector<float> q_, k_;  // [rows, head_dim]
  std::uint64_t projection_seed_;
  std::vector<double> exact_;
};

// The errors of one trial, in percent. The paper's Tables 3 and 4 show the signed one: only it has their magnitude, and
// the authors' script takes |mean (S_hat - S)| of each trial. Relative to the mean of S it is a little nearer to the
// printed numbers than |mean ((S_hat - S) / S)|, which is up to 5 % larger at G = 2.
struct ErrorStatistics {
  double signed_mean;  // |mean (S_hat - S)| / mean S
  double elementwise;  // mean (|S_hat - S| / S)
};

[[nodiscard]] ErrorStatistics statistics_of(const std::vector<double>& exact, const std::vector<double>& approximate);

}  // namespace distr::cli
