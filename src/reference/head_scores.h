// SPDX-License-Identifier: Apache-2.0
// The scores of one query head, row by row: approximate, near keys exact, far halves of tiles skipped (method, 2 and
// 8).
#pragma once

#include <cstdint>
#include <vector>

#include "common/near.h"
#include "reference/head.h"

namespace distr::reference {

// What scores are made of.
struct ScoreTensors {
  const void* q;
  const void* k;
  const void* mask;
  const std::int32_t* order;
  const float* key_means;
};

template <class Tensors>
[[nodiscard]] ScoreTensors score_tensors(const Tensors& tensors) {
  return {tensors.q, tensors.k, tensors.mask, tensors.order, tensors.key_means};
}

// Far halves of tiles in which one of 64 rows sees a far key: how many were kept, and how many there are.
struct Halves {
  std::int32_t kept = 0, seen = 0;
};

// Rows must be asked for in ascending order, but for those of the block of the last one.
class HeadScores {
 public:
  HeadScores(const Problem& problem, const Grouping& grouping, const ScoreTensors& tensors, const Head& head);

  // S_hat of row i: near keys' from all columns, far keys' from q_hat and k_hat and, of dropped columns, the means of
  // the keys; -inf for hidden keys.
  void row(std::int64_t i, std::vector<double>& s);
  // Of the cap at the score of row i, the last one, and key j, which row() found.
  [[nodiscard]] double cap_slope(std::int64_t i, std::int64_t j) const;
  // Scores from all columns.
  void exact_row(std::int64_t i, std::vector<double>& s);
  // Scores of rows first .. first + s.size() - 1, at most 64: S_hat, with -inf in the far halves that are skipped.
  // With `finish` those that are kept are exact.
  Halves skipped_rows(std::int64_t first, std::vector<std::vector<double>>& s);

  // Of the block of the last row.
  [[nodiscard]] const common::Groups& groups() const noexcept { return groups_; }
  [[nodiscard]] const Matrix& k_hat() const noexcept { return k_hat_; }
  [[nodiscard]] bool is_near(std::int64_t j) const noexcept { return near_.has_key(j); }
  [[nodiscard]] const double* q_of(std::int64_t i) const noexcept { return q_.row(i - first_row()); }
  [[nodiscard]] const double* q_hat_of(std::int64_t i) const noexcept { return q_hat_.row(i - first_row()); }
  [[nodiscard]] const Matrix& k() const noexcept { return k_; }
  // What stands for column c of far keys, which their score drops: 0 where there are no means.
  [[nodiscard]] double dropped_key(std::int64_t c) const noexcept { return dropped_keys_[static_cast<std::size_t>(c)]; }

 private:
  [[nodiscard]] std::int64_t first_row() const noexcept { return block_ * grouping_.block; }
  void enter_block_of(std::int64_t i);
  // What the means of the keys stand for in the far scores of row i, without the scale.
  [[nodiscard]] double dropped_score(std::int64_t i) const;
  // Marks the far halves that the last row, whose scores these are, keeps, and those in which it sees a far key.
  void vote(const std::vector<double>& s, std::vector<char>& kept, std::vector<char>& seen) const;

  const Problem& problem_;
  const Grouping& grouping_;
  const ScoreTensors tensors_;
  const Head head_;
  common::MaskView mask_;
  Matrix k_;
  std::int64_t block_ = -1;
  common::NearTiles near_;  // of the last row
  common::Groups groups_;
  std::vector<double> dropped_keys_;  // [d]
  Matrix q_, q_hat_, k_hat_;
};

}  // namespace distr::reference
