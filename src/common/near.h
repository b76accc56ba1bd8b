// SPDX-License-Identifier: Apache-2.0
// Near keys, whose scores are exact, and halves of tiles that may be skipped (method, 8).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/block.h"
#include "common/mask.h"

namespace distr::common {

inline constexpr std::int64_t kNearTile = 128;  // keys that are near or far together
inline constexpr std::int64_t kSkipRows = 64;   // rows, and
inline constexpr std::int64_t kSkipKeys = 64;   // keys that are kept or skipped together: half a tile

[[nodiscard]] inline bool has_near_keys(const Grouping& grouping) noexcept {
  return grouping.window.has_value() || grouping.sinks > 0;
}

// Whether a far score stands for a dropped column by its mean over the keys.
[[nodiscard]] inline bool has_key_means(const Grouping& grouping) noexcept {
  const StrategyTraits& strategy = traits(grouping.strategy);
  return has_near_keys(grouping) && !is_exact(grouping) && strategy.members == Members::one;
}

// Whether scores of near keys and LSE carry the means too, so that they compare with far scores: not where far ones
// only decide what is skipped.
[[nodiscard]] inline bool keeps_key_means(const Grouping& grouping) noexcept {
  return has_key_means(grouping) && !grouping.finish;
}

// Of key_means_shape()'s axis 2: one mean for each block of queries, or one for all.
[[nodiscard]] inline std::int64_t num_key_means(const Problem& problem, const Grouping& grouping) noexcept {
  return grouping.order_from == OrderFrom::previous ? num_blocks(problem, grouping) : 1;
}

// Where the means of a block of queries begin, in [batch, heads_kv, num_key_means, d].
[[nodiscard]] inline std::int64_t key_means_at(const Problem& problem, const Grouping& grouping, std::int64_t b,
                                               std::int64_t h_kv, std::int64_t block) noexcept {
  const std::int64_t means = num_key_means(problem, grouping);
  return ((b * problem.heads_kv + h_kv) * means + (means == 1 ? 0 : block)) * problem.head_dim;
}

// Rows that have the same near keys: a block's, and 128 where one grouping serves the whole sequence.
[[nodiscard]] inline std::int64_t near_rows(const Problem& problem, const Grouping& grouping) noexcept {
  return grouping.block >= problem.seq_q && !grouping.part.has_value() ? kNearTile : grouping.block;
}

// The first keys that are near whatever the row, as many of them as this call has.
[[nodiscard]] inline std::int64_t count_sinks(const Problem& problem, const Grouping& grouping) noexcept {
  const std::int64_t before = grouping.part.value_or(Part{}).first_key;
  return std::clamp<std::int64_t>(grouping.sinks - before, 0, problem.seq_k);
}

// The key that stands beside query 0.
[[nodiscard]] inline std::int64_t near_offset(const Problem& problem, const Grouping& grouping) noexcept {
  return grouping.part.has_value() ? grouping.part->first_row - grouping.part->first_key
                                   : grouping.key_offset.value_or(band_offset(problem));
}

// The near keys of some rows: whole tiles, [0, sinks) and [first, last), none of them past the last key's tile.
struct NearTiles {
  std::int64_t sinks = 0, first = 0, last = 0;

  [[nodiscard]] bool has(std::int64_t tile) const noexcept { return tile < sinks || (tile >= first && tile < last); }
  [[nodiscard]] bool has_key(std::int64_t key) const noexcept { return has(key / kNearTile); }
};

// Of the rows that share them with row i.
[[nodiscard]] inline NearTiles near_tiles(const Problem& problem, const Grouping& grouping, std::int64_t i) noexcept {
  NearTiles result;
  result.sinks = ceil_div(count_sinks(problem, grouping), kNearTile);
  if (grouping.window.has_value()) {
    const std::int64_t rows = near_rows(problem, grouping);
    const std::int64_t n0 = i / rows * rows;
    const std::int64_t n1 = std::min(n0 + rows, problem.seq_q) - 1;
    const std::int64_t offset = near_offset(problem, grouping);
    const std::int64_t low = std::max<std::int64_t>(n0 + offset - *grouping.window, 0);
    const std::int64_t high = std::min(n1 + offset + *grouping.window, problem.seq_k - 1);
    if (low <= high) {
      result.first = low / kNearTile;
      result.last = high / kNearTile + 1;
    }
  }
  return result;
}

// Shape of ForwardTensors::halves but for its last axis, 2.
[[nodiscard]] inline std::int64_t num_skip_rows(const Problem& problem) noexcept {
  return ceil_div(problem.seq_q, kSkipRows);
}

// Why a kernel without near keys does not serve; empty: it does.
[[nodiscard]] inline std::string reason_against_near_keys(const Grouping& grouping) {
  return has_near_keys(grouping) ? "has no near keys; window and sinks are for other kernels" : "";
}

}  // namespace distr::common
