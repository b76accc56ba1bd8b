// SPDX-License-Identifier: Apache-2.0
// A tile of queries in segments that share one grouping: q_hat, k_hat and scores. This file is included once for each
// instruction set.
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

#include "common/block.h"
#include "common/mask.h"
#include "cpu/matmul-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// The rows of a tile that share one order.
struct Segment {
  std::int64_t first;  // within the tile
  std::int64_t rows;
  common::Groups groups;
};

struct Segments {
  std::array<Segment, kTileQueries> all;
  std::int64_t count = 0;

  [[nodiscard]] const Segment* begin() const { return all.data(); }
  [[nodiscard]] const Segment* end() const { return all.data() + count; }
};

inline Segments find_segments(const Problem& problem, const Grouping& grouping, const std::int32_t* order,
                              const QueryTile& tile) {
  Segments segments;
  const std::int64_t block_rows = is_exact(grouping) ? problem.seq_q : grouping.block;
  for (std::int64_t n = 0; n < tile.rows;) {
    const std::int64_t block = (tile.first + n) / block_rows;
    const std::int64_t left_in_block = std::min(block_rows - (tile.first + n) % block_rows, tile.rows - n);
    segments.all[static_cast<std::size_t>(segments.count++)] = {
        n, left_in_block, common::block_groups(problem, grouping, order, tile.b, tile.h, block)};
    n += left_in_block;
  }
  return segments;
}

// Computes q_hat [rows, stride] of the segment's rows: the sampled column or the mean of each group, padded with 0. `q`
// is the tile's first row.
template <class T>
void estimate_q(const Problem& problem, Estimator estimator, const Segment& segment, const T* q, float* q_hat,
                std::int64_t stride) {
  const common::Groups& groups = segment.groups;
  if (groups.order == nullptr) {
    load_rows(q + segment.first * problem.q.row, problem.q.row, segment.rows, groups.count, stride,
              q_hat + segment.first * stride, stride);
    return;
  }
  const std::int64_t summed = estimator == Estimator::mean ? groups.members : 1;
  std::array<float, kMaxHeadDim> row;
  for (std::int64_t n = segment.first; n < segment.first + segment.rows; ++n) {
    load_row(q + n * problem.q.row, problem.head_dim, row.data());
    float* estimate = q_hat + n * stride;
    std::fill_n(estimate, stride, 0.0F);
    for (std::int64_t member = 0; member < summed; ++member) {
      const std::int64_t holders = std::min(groups.count, common::ceil_div(groups.columns - member, groups.members));
      for (std::int64_t g = 0; g < holders; ++g) {
        estimate[g] += row[static_cast<std::size_t>(groups.order[g * groups.members + member])];
      }
    }
    for (std::int64_t g = 0; summed > 1 && g < groups.count; ++g) {
      estimate[g] /= static_cast<float>(groups.size(g));
    }
  }
}

// Pointers to the rows of k_hat^T: a row of K^T itself where a group has one column, else a row of sums in k_hat
// [r, 128].
using KHatRows = std::array<const float*, kMaxHeadDim>;

inline void fuse_k(const common::Groups& groups, const float* k_transposed, std::int64_t padded_keys, float* k_hat,
                   KHatRows& rows) {
  std::array<const float*, kMaxHeadDim> members;
  for (std::int64_t g = 0; g < groups.count; ++g) {
    for (std::int64_t member = 0; member < groups.size(g); ++member) {
      members[static_cast<std::size_t>(member)] = k_transposed + groups.column(g, member) * kTileKeys;
    }
    if (groups.size(g) == 1) {
      rows[static_cast<std::size_t>(g)] = members[0];
    } else {
      add_rows(members.data(), groups.size(g), padded_keys, k_hat + g * kTileKeys);
      rows[static_cast<std::size_t>(g)] = k_hat + g * kTileKeys;
    }
  }
}

// The unit that the scores of a problem are in when they go to the softmax: q_hat k_hat^T as it is, or S where
// something is added to them, or where their order or fp32's range asks for it.
struct ScoreUnit {
  ScoreUnit(const Problem& problem, const common::MaskView& mask)
      : scale(problem.softmax_scale()),
        is_raw(mask.none() && problem.softmax_scale() * std::numbers::log2e >= std::numeric_limits<float>::min() &&
               problem.softmax_scale() * std::numbers::log2e <= std::numeric_limits<float>::max()),
        to_log2(static_cast<float>((is_raw ? problem.softmax_scale() : 1) * std::numbers::log2e)),
        to_natural(is_raw ? problem.softmax_scale() : 1) {}

  Factor scale;
  bool is_raw;
  float to_log2;      // from this unit to logarithms to the base 2
  Factor to_natural;  // from this unit to S
};

// Row n of q_hat k_hat^T of a tile, against `keys` keys from first_key on, to the unit and under the mask and
// causality; what is behind the keys becomes -inf.
inline void finish_scores(const Problem& problem, const common::MaskView& mask, const ScoreUnit& unit,
                          const QueryTile& tile, std::int64_t n, std::int64_t first_key, std::int64_t keys,
                          std::int64_t padded_keys, float* scores) {
  const std::int64_t i = tile.first + n;
  if (!unit.is_raw) {
    scale_row(scores, padded_keys, unit.scale);
    mask.add(scores, tile.b, tile.h, i, first_key, keys);
  }
  const std::int64_t visible = std::clamp<std::int64_t>(common::visible_keys(problem, i) - first_key, 0, keys);
  std::fill(scores + visible, scores + padded_keys, kHidden);
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
