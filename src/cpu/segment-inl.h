// SPDX-License-Identifier: Apache-2.0
// A tile of queries in segments that share one grouping and its near keys: q_hat, k_hat and scores. This file is
// included once for each instruction set.
#if defined(DISTR_CPU_SEGMENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_SEGMENT_INL_H_
#undef DISTR_CPU_SEGMENT_INL_H_
#else
#define DISTR_CPU_SEGMENT_INL_H_
#endif

#include <hwy/highway.h>

#include <array>
#include <cstdint>
#include <limits>
#include <numbers>
#include <type_traits>

#include "common/mask.h"
#include "common/near.h"
#include "cpu/matmul-inl.h"
#include "cpu/operand-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// What the means add to a score is one float, or three numbers of bf16 that have its bits.
template <class Word>
inline constexpr std::int64_t kMeansWords = std::is_same_v<Word, float> ? 1 : 2;

// The rows of a tile that share one order and have the same near keys.
struct Segment {
  std::int64_t first;  // within the tile
  std::int64_t rows;
  common::Groups groups;
  common::NearTiles near;        // whose scores are exact
  const float* means = nullptr;  // [d], of the keys: what far scores keep of dropped columns; null: nothing

  // Words of a row of q_hat and k_hat: the groups, and where k_hat is 1 and q_hat what the means add to a score.
  template <class Word>
  [[nodiscard]] std::int64_t columns() const {
    return words<Word>(groups.count) + (means == nullptr ? 0 : kMeansWords<Word>);
  }
  // The same rows with all columns of Q and K.
  [[nodiscard]] Segment exact() const { return {first, rows, {nullptr, groups.columns, groups.columns, 1}, near}; }
};

struct Segments {
  std::array<Segment, kTaskQueries> all;
  std::int64_t count = 0;

  [[nodiscard]] Segment* begin() { return all.data(); }
  [[nodiscard]] Segment* end() { return all.data() + count; }
  [[nodiscard]] const Segment* begin() const { return all.data(); }
  [[nodiscard]] const Segment* end() const { return all.data() + count; }
};

// The first row behind i that has another order, other near keys or, where some are skipped, another vote.
inline std::int64_t segment_end(const Problem& problem, const Grouping& grouping, std::int64_t i) {
  const auto end_of = [&](std::int64_t rows) { return i + rows - i % rows; };
  std::int64_t end = end_of(is_exact(grouping) ? problem.seq_q : std::min(grouping.block, problem.seq_q));
  if (common::has_near_keys(grouping)) {
    end = std::min(end, end_of(common::near_rows(problem, grouping)));
  }
  return grouping.skip > 0 ? std::min(end, end_of(common::kSkipRows)) : end;
}

template <class Tensors>
Segments find_segments(const Problem& problem, const Grouping& grouping, const Tensors& tensors,
                       const QueryTile& tile) {
  Segments segments;
  for (std::int64_t n = 0; n < tile.rows;) {
    const std::int64_t i = tile.first + n;
    const std::int64_t end = std::min(segment_end(problem, grouping, i), tile.first + tile.rows);
    const std::int64_t block = is_exact(grouping) ? 0 : i / grouping.block;
    Segment& segment = segments.all[static_cast<std::size_t>(segments.count++)];
    segment = {n, end - i, common::block_groups(problem, grouping, tensors.order, tile.b, tile.h, block),
               common::near_tiles(problem, grouping, i)};
    if (common::has_key_means(grouping) && !common::is_exact_block(grouping, block)) {
      const std::int64_t h_kv = tile.h / (problem.heads_q / problem.heads_kv);
      segment.means = tensors.key_means + common::key_means_at(problem, grouping, tile.b, h_kv, block);
    }
    n += segment.rows;
  }
  return segments;
}

// What a row's far scores keep of the columns that they drop: the sum of q_c times the mean of K's column c.
inline float dropped_score(const Segment& segment, const float* q) {
  double sum = 0;
  for (std::int64_t position = segment.groups.count; position < segment.groups.columns; ++position) {
    const std::int32_t c = segment.groups.order[position];
    sum += static_cast<double>(q[c]) * static_cast<double>(segment.means[c]);
  }
  return static_cast<float>(sum);
}

// estimate = the sampled column or the mean of each group of a row's columns.
inline void estimate_row(const common::Groups& groups, Estimator estimator, const float* row, float* estimate) {
  const std::int64_t summed = estimator == Estimator::mean ? groups.members : 1;
  std::fill_n(estimate, groups.count, 0.0F);
  for (std::int64_t member = 0; member < summed; ++member) {
    const std::int64_t holders = std::min(groups.count, common::ceil_div(groups.columns - member, groups.members));
    for (std::int64_t g = 0; g < holders; ++g) {
      estimate[g] += row[groups.order[g * groups.members + member]];
    }
  }
  for (std::int64_t g = 0; summed > 1 && g < groups.count; ++g) {
    estimate[g] /= static_cast<float>(groups.size(g));
  }
}

// Writes a row of q_hat, zeros before: its estimates, and what the means of the keys add to its scores.
template <class T>
void write_q_hat(const Segment& segment, Estimator estimator, const T* q, float* q_hat) {
  std::array<float, kMaxHeadDim> row;
  load_row(q, segment.groups.columns, row.data());
  estimate_row(segment.groups, estimator, row.data(), q_hat);
  if (segment.means != nullptr) {
    q_hat[segment.groups.count] = dropped_score(segment, row.data());
  }
}

// Computes q_hat [rows, stride] of the segment's rows, padded with 0. `q` is the tile's first row.
template <class T, class Word>
void estimate_q(const Problem& problem, Estimator estimator, const Segment& segment, const T* q, Word* q_hat,
                std::int64_t stride) {
  const common::Groups& groups = segment.groups;
  if (groups.order == nullptr) {
    load_rows(q + segment.first * problem.q.row, problem.q.row, segment.rows, groups.count, stride,
              q_hat + segment.first * stride, stride);
    return;
  }
  for (std::int64_t n = segment.first; n < segment.first + segment.rows; ++n) {
    std::fill_n(q_hat + n * stride, stride, Word{});
    write_q_hat(segment, estimator, q + n * problem.q.row, q_hat + n * stride);
  }
}

// What the means add to a row's far scores, from its q_hat.
inline float score_of_means(const float* q_hat, const common::Groups& groups) { return q_hat[groups.count]; }

// The row of k_hat^T that stands for dropped columns.
template <class Word>
inline constexpr auto kOnes = [] {
  std::array<Word, kTileKeys> ones{};
  ones.fill(one<Word>());
  return ones;
}();

// row = a row of k_hat^T: the sum of the group's columns.
inline void fuse_group(const common::Groups& groups, std::int64_t g, const float* k_transposed,
                       std::int64_t padded_keys, float* row) {
  std::array<const float*, kMaxHeadDim> members;
  for (std::int64_t member = 0; member < groups.size(g); ++member) {
    members[static_cast<std::size_t>(member)] = k_transposed + groups.column(g, member) * kTileKeys;
  }
  add_rows(members.data(), groups.size(g), padded_keys, row);
}

// Pointers to the rows of k_hat^T: a row of K^T itself where a group has one column, else a row of sums in k_hat
// [r, 128]; of pairs a row of K^T where all columns are kept, else one in k_hat, to which sums are rounded.
template <class Word>
using KHatRows = std::array<const Word*, kMaxHeadDim>;

inline void fuse_k(const Segment& segment, const float* k_transposed, std::int64_t padded_keys, float* k_hat,
                   KHatRows<float>& rows) {
  const common::Groups& groups = segment.groups;
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const float*& row = rows[static_cast<std::size_t>(g)];
    row = groups.size(g) == 1 ? k_transposed + groups.column(g, 0) * kTileKeys : k_hat + g * kTileKeys;
    if (groups.size(g) > 1) {
      fuse_group(groups, g, k_transposed, padded_keys, k_hat + g * kTileKeys);
    }
  }
  if (segment.means != nullptr) {
    rows[static_cast<std::size_t>(groups.count)] = kOnes<float>.data();
  }
}

// k_hat [keys, stride], the sums in floats, for products that sum over the keys; with zeros up to a whole vector.
template <class Word>
void fuse_k_by_key(const Segment& segment, const Word* k_transposed, std::int64_t padded_keys, float* k_hat,
                   std::int64_t stride) {
  const common::Groups& groups = segment.groups;
  const std::int64_t columns = segment.columns<float>();
  const std::int64_t padded_columns = round_up(columns, std::max<std::int64_t>(vector_length(), 4));
  alignas(64) std::array<std::array<float, kTileKeys>, 4> sums;
  for (std::int64_t first = 0; first < padded_columns; first += 4) {
    std::array<const float*, 4> four{};
    for (std::int64_t n = 0; n < 4; ++n) {
      const std::int64_t g = first + n;
      float* sum = sums[static_cast<std::size_t>(n)].data();
      four[static_cast<std::size_t>(n)] = g == groups.count && g < columns ? kOnes<float>.data() : sum;
      if (g < groups.count) {
        fuse_group(groups, g, k_transposed, padded_keys, sum);
      } else {
        std::fill_n(sum, padded_keys, 0.0F);
      }
    }
    for (std::int64_t j = 0; j < padded_keys; j += 4) {
      transpose_4x4(four, j, k_hat + j * stride + first, stride);
    }
  }
}

// Pointers to the rows of K^T of the columns that a segment drops, with which scores are finished.
inline void dropped_columns(const Segment& segment, const float* k_transposed, std::int64_t /*padded_keys*/,
                            float* /*k_hat*/, KHatRows<float>& rows) {
  const common::Groups& groups = segment.groups;
  for (std::int64_t position = groups.count; position < groups.columns; ++position) {
    rows[static_cast<std::size_t>(position - groups.count)] = k_transposed + groups.order[position] * kTileKeys;
  }
}

// The unit that the scores of a problem are in when they go to the softmax: q_hat k_hat^T as it is, or S where
// something is done to them, or where their order or fp32's range asks for it.
struct ScoreUnit {
  ScoreUnit(const Problem& problem, const common::MaskView& mask)
      : scale(problem.softmax_scale()),
        is_raw(mask.none() && problem.softcap == 0 &&
               problem.softmax_scale() * std::numbers::log2e >= std::numeric_limits<float>::min() &&
               problem.softmax_scale() * std::numbers::log2e <= std::numeric_limits<float>::max()),
        to_log2(static_cast<float>((is_raw ? problem.softmax_scale() : 1) * std::numbers::log2e)),
        to_natural(is_raw ? problem.softmax_scale() : 1) {}

  Factor scale;
  bool is_raw;
  float to_log2;      // from this unit to logarithms to the base 2
  Factor to_natural;  // from this unit to S
};

// Whether one of the rows from query i on sees one of the keys, if the mask lets it.
inline bool see_any(const Problem& problem, std::int64_t i, std::int64_t rows, std::int64_t first_key,
                    std::int64_t keys) {
  const common::KeySpan visible = common::visible_keys(problem, i, rows);
  return visible.first < first_key + keys && first_key < visible.end;
}

// Whether query i sees all of so many keys, if the mask lets it.
inline bool sees_all(const Problem& problem, std::int64_t i, std::int64_t first_key, std::int64_t keys) {
  const common::KeySpan visible = common::visible_keys(problem, i);
  return visible.first <= first_key && visible.end >= first_key + keys;
}

// Row n of q_hat k_hat^T of a tile, against `keys` keys from first_key on, to the unit and under the mask, the
// window and causality; what is behind the keys becomes -inf. `slopes`, unless null: of the cap, where there is one.
inline void finish_scores(const Problem& problem, const common::MaskView& mask, const ScoreUnit& unit,
                          const QueryTile& tile, std::int64_t n, std::int64_t first_key, std::int64_t keys,
                          std::int64_t padded_keys, float* scores, float* slopes = nullptr) {
  const std::int64_t i = tile.first + n;
  if (!unit.is_raw) {
    scale_row(scores, padded_keys, unit.scale);
    if (problem.softcap != 0) {
      cap_row(scores, padded_keys, problem.softcap, slopes);
    }
    mask.add(scores, tile.b, tile.h, i, first_key, keys);
  }
  const common::KeySpan visible = common::visible_keys(problem, i);
  std::fill(scores, scores + std::clamp<std::int64_t>(visible.first - first_key, 0, keys), kHidden);
  std::fill(scores + std::clamp<std::int64_t>(visible.end - first_key, 0, keys), scores + padded_keys, kHidden);
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
