// SPDX-License-Identifier: Apache-2.0
// The parts of textbook attention that forward and backward share: rounding, masks, groups and the scores of one row.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "common/element.h"
#include "support/oracle.h"

namespace distr::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Sanitizers watch what the library reads and writes, for every case and dtype. To find the truth takes longer, and its
// values are the release build's to judge.
inline constexpr bool kValuesAreJudged = DISTR_SANITIZED == 0;

// sums[n] += factor * values[n]; the second rounds each sum to fp32.
void add_products(std::size_t count, double factor, const double* values, double* sums);
void add_products_rounded(std::size_t count, double factor, const double* values, double* sums);

// Rounds a value as the precision says.
struct Rounding {
  Precision precision;
  DType dtype;

  [[nodiscard]] double sum(double x) const { return precision == Precision::float64 ? x : static_cast<float>(x); }
  // sums[n] += factor * values[n], each rounded.
  void add(std::size_t count, double factor, const double* values, double* sums) const {
    (precision == Precision::float64 ? add_products : add_products_rounded)(count, factor, values, sums);
  }
  [[nodiscard]] double operand(double x) const {
    if (precision == Precision::float64) {
      return x;
    }
    double result = 0;
    common::with_element(
        dtype, [&]<class T>(std::type_identity<T>) { result = common::to_double(common::from_double<T>(x)); });
    return result;
  }
  // Rounds a column of q_hat, with or without the scale that its scores are multiplied by.
  [[nodiscard]] double estimate(double x, double scale) const {
    constexpr double kLog2E = 1.4426950408889634;
    const double factor = precision == Precision::plain_with_scale ? scale * kLog2E : 1;
    return operand(x * factor) / factor;
  }
};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline double element(const void* data, DType dtype, const Strides& s, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t c) {
  return common::load(data, dtype, b * s.batch + h * s.head + i * s.row + c);
}

// What the mask adds to a score; -inf hides the key.
inline double mask_at(const Instance& instance, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  const Problem& p = instance.test_case.problem;
  if (p.causal == Causal::top_left && j > i) {
    return -kInfinity;
  }
  if (p.causal == Causal::bottom_right && j - p.seq_k > i - p.seq_q) {
    return -kInfinity;
  }
  const std::int64_t beside = i + (p.causal == Causal::bottom_right ? p.seq_k - p.seq_q : p.window_offset.value_or(0));
  if ((p.window_left.has_value() && j < beside - *p.window_left) ||
      (p.window_right.has_value() && j > beside + *p.window_right)) {
    return -kInfinity;
  }
  if (p.mask.kind == MaskKind::none) {
    return 0;
  }
  const std::array<std::int64_t, 4> position{b, h, i, j};
  std::int64_t index = 0;
  for (int axis = 0; axis < p.mask.rank; ++axis) {
    const auto a = static_cast<std::size_t>(axis);
    const std::int64_t at = position[static_cast<std::size_t>(4 - p.mask.rank + axis)];
    index += (p.mask.shape[a] == 1 ? 0 : at) * p.mask.strides[a];
  }
  if (p.mask.kind == MaskKind::boolean) {
    return instance.boolean_mask[static_cast<std::size_t>(index)] != 0 ? 0 : -kInfinity;
  }
  return instance.mask.at(index);
}

// The columns of each group of one block.
inline std::vector<std::vector<std::int64_t>> groups_of(const Instance& instance, std::int64_t b, std::int64_t h,
                                                        std::int64_t i) {
  const Problem& p = instance.test_case.problem;
  const Grouping& g = instance.test_case.grouping;
  const std::int64_t block = i / g.block;
  const StrategyTraits& strategy = traits(g.strategy);
  const bool first_is_exact = strategy.order == OrderSource::computed && g.order_from == OrderFrom::previous;
  const bool exact = strategy.order == OrderSource::none || g.group_size == 1 || (first_is_exact && block == 0);
  const bool drops = !exact && strategy.members == Members::one;
  const std::int64_t blocks = (p.seq_q + g.block - 1) / g.block;
  std::vector<std::vector<std::int64_t>> groups;
  for (std::int64_t position = 0; position < p.head_dim; ++position) {
    const std::int64_t column =
        exact
            ? position
            : instance.order[static_cast<std::size_t>(((b * p.heads_q + h) * blocks + block) * p.head_dim + position)];
    if (exact || drops || position % g.group_size == 0) {
      groups.emplace_back();
    }
    groups.back().push_back(column);
  }
  if (drops) {
    groups.resize(static_cast<std::size_t>((p.head_dim + g.group_size - 1) / g.group_size));
  }
  return groups;
}

// Whether key j is near row i: in a tile of 128 keys that holds one of the first `sinks` keys, or one at most `window`
// keys from a row of the same block (of 128 rows where one order serves all).
inline bool is_near(const Instance& instance, std::int64_t i, std::int64_t j) {
  const Problem& p = instance.test_case.problem;
  const Grouping& g = instance.test_case.grouping;
  const std::int64_t first_key = j - j % 128;
  if (first_key < g.sinks) {
    return true;
  }
  if (!g.window.has_value()) {
    return false;
  }
  const std::int64_t rows = g.block >= p.seq_q ? 128 : g.block;
  const std::int64_t offset =
      g.key_offset.value_or(p.causal == Causal::bottom_right ? p.seq_k - p.seq_q : p.window_offset.value_or(0));
  const std::int64_t first_row = i - i % rows;
  const std::int64_t last_row = std::min(first_row + rows, p.seq_q) - 1;
  const std::int64_t last_key = std::min(first_key + 128, p.seq_k) - 1;
  return last_key >= first_row + offset - *g.window && first_key <= last_row + offset + *g.window;
}

// One query row: its position, q_hat, and the scores of all keys (-inf where a key is hidden or skipped).
struct TextbookRow {
  std::int64_t b, h, i, h_kv;
  std::vector<double> q_hat;   // [r]
  std::vector<double> q;       // [d]
  std::vector<double> s;       // [Nk]
  std::vector<double> slopes;  // [Nk]: of the cap on the scores, 1 without
  std::vector<char> is_near;   // [Nk]
};

// What is skipped for 64 rows of a head, decided in float64.
struct Skipped {
  std::vector<char> kept, seen;  // by halves of 64 keys
  bool is_close = false;         // rounding may decide one of them otherwise
};

// Goes through all rows of an instance. The groups, k_hat and v are those of the block of the last row.
class TextbookRows {
 public:
  TextbookRows(const Instance& instance, Rounding round, std::int64_t rotation)
      : instance_(instance), round_(round), rotation_(rotation) {}
  TextbookRow row(std::int64_t n);
  // Of the 64 rows of row n, the row of the last call.
  [[nodiscard]] const Skipped& skipped() const { return skipped_; }

  std::vector<std::vector<std::int64_t>> groups;
  // In both layouts, so that the inner loops have independent sums.
  std::vector<double> k_hat, k_hat_transposed;  // [Nk, r], [r, Nk]
  std::vector<double> k, k_transposed;          // [Nk, d], [d, Nk]
  std::vector<double> v, v_transposed;          // [Nk, dv], [dv, Nk]
  std::vector<double> dropped;                  // [d]: what far keys have in columns that they drop

 private:
  void fuse(const TextbookRow& row);
  void read_keys(const TextbookRow& row);
  [[nodiscard]] TextbookRow unskipped_row(std::int64_t n);
  [[nodiscard]] std::vector<double> products(const std::vector<double>& q, const std::vector<double>& k) const;
  void finish_scores(TextbookRow& row, std::vector<double>& s) const;
  void decide(std::int64_t first, std::int64_t end);

  const Instance& instance_;
  Rounding round_;
  std::int64_t rotation_;    // where the sums over the groups begin
  std::int64_t fused_ = -1;  // the block whose groups and k_hat these are, counted over all heads
  std::int64_t read_ = -1;   // the head of K and V that these are, counted over the batch
  Skipped skipped_;
  std::int64_t decided_ = -1;  // the rows whose halves these are, counted over all heads
};

}  // namespace distr::test
