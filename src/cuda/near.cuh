// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees, and which tiles of keys are near some rows, for kernels (method, 4 and 8; on the host
// common/mask.h and common/near.h).
#pragma once

#include <cstdint>

#include "cuda/problem.h"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda {

// What says which keys a row sees: a problem, or one batch entry's part of it (sm90/batch_entry.cuh).
struct VisibleKeys {
  bool causal;
  std::int64_t seq_k, causal_offset, first_offset;
};

// Query i sees the keys first_visible_key .. visible_keys - 1, less what the mask hides.
template <class Keys>
[[nodiscard]] __device__ std::int64_t visible_keys(const Keys& of, std::int64_t i) {
  if (!of.causal) {
    return of.seq_k;
  }
  return max(min(i + of.causal_offset + 1, of.seq_k), std::int64_t{0});
}

// Whether a sliding window has a left end.
template <class Keys>
[[nodiscard]] __host__ __device__ bool has_left_end(const Keys& of) {
  return of.first_offset != -common::kUnlimited;
}

template <class Keys>
[[nodiscard]] __device__ std::int64_t first_visible_key(const Keys& of, std::int64_t i) {
  return max(min(i + of.first_offset, of.seq_k), std::int64_t{0});
}

// Keys that any of a tile's queries sees, from key 0 on. rows: of a tile; row_end: behind the last query.
[[nodiscard]] __device__ inline std::int64_t seen_keys(const DeviceProblem& problem, const WorkTile& tile, int rows,
                                                       std::int64_t row_end) {
  return visible_keys(problem, min(std::int64_t{tile.row} + rows, row_end) - 1);
}

// The near keys of some rows among the tiles of 128 keys begin .. end - 1, in two runs that do not overlap: [begin,
// sinks) and [first, last). The others are far: [sinks, first) and [last, end).
struct NearTiles {
  int begin, sinks, first, last, end;

  [[nodiscard]] __device__ bool has(int tile) const {
    return (tile >= begin && tile < sinks) || (tile >= first && tile < last);
  }
  [[nodiscard]] __device__ int near_count() const { return sinks - begin + last - first; }
  [[nodiscard]] __device__ int far_count() const { return end - begin - near_count(); }
  // The n-th near tile, and the n-th far one, in ascending order.
  [[nodiscard]] __device__ int near(int n) const { return n < sinks - begin ? begin + n : first + n - (sinks - begin); }
  [[nodiscard]] __device__ int far(int n) const { return n < first - sinks ? sinks + n : last + n - (first - sinks); }
  // How many far tiles come before a far one, and near ones before a near one where sinks come last.
  [[nodiscard]] __device__ int near_before(int tile) const {
    return tile < sinks ? last - first + tile - begin : tile - first;
  }
  [[nodiscard]] __device__ int far_before(int tile) const { return tile - sinks - (tile < first ? 0 : last - first); }
};

// What is near one of the rows first_row .. last_row, whose near keys are neighbours, or those of the rows that share
// them. `keys`: those that the caller looks at, from key 0 on, less what lies before the first row's sliding window.
[[nodiscard]] __device__ inline NearTiles near_tiles(const DeviceProblem& problem, std::int64_t first_row,
                                                     std::int64_t last_row, std::int64_t keys) {
  constexpr std::int64_t kTile = common::kNearTile;
  const DeviceNear& near = problem.near;
  const auto end = static_cast<int>((keys + kTile - 1) / kTile);
  const int begin = min(static_cast<int>(first_visible_key(problem, first_row) / kTile), end);
  const int sinks = max(min(near.sinks, end), begin);
  NearTiles result{begin, sinks, sinks, sinks, end};
  if (near.has_window) {
    const std::int64_t n0 = first_row / near.rows * near.rows;
    const std::int64_t n1 = min((last_row / near.rows + 1) * near.rows, problem.seq_q) - 1;
    const std::int64_t low = max(n0 + near.offset - near.window, std::int64_t{0});
    const std::int64_t high = min(n1 + near.offset + near.window, problem.seq_k - 1);
    if (low <= high) {
      result.first = min(max(static_cast<int>(low / kTile), sinks), end);
      result.last = min(max(static_cast<int>(high / kTile) + 1, result.first), end);
    }
  }
  return result;
}

[[nodiscard]] __device__ inline NearTiles near_tiles(const DeviceProblem& problem, std::int64_t row,
                                                     std::int64_t keys) {
  return near_tiles(problem, row, row, keys);
}

// The rows first .. last - 1: those that a tile of keys is near to, if it has a key. There may be none.
struct NearRows {
  std::int64_t first, last;
};

[[nodiscard]] __host__ __device__ inline NearRows near_rows(const DeviceProblem& problem, int tile) {
  constexpr std::int64_t kTile = common::kNearTile;
  const DeviceNear& near = problem.near;
  if (tile < near.sinks) {
    return {0, problem.seq_q};
  }
  // Rows n0 .. n1 that share their near keys have the tile where n0 <= high and n1 >= low.
  const std::int64_t key = tile * kTile;
  const std::int64_t end = key + kTile < problem.seq_k ? key + kTile : problem.seq_k;
  const std::int64_t low = key - near.offset - near.window;
  const std::int64_t high = end - 1 - near.offset + near.window;
  if (!near.has_window || high < 0 || low >= problem.seq_q) {
    return {0, 0};
  }
  const std::int64_t last = (high / near.rows + 1) * near.rows;
  return {low < 0 ? 0 : low / near.rows * near.rows, last < problem.seq_q ? last : problem.seq_q};
}

// The 64 rows of a tile that keep and skip together, its `group`-th ones, counted over all heads.
[[nodiscard]] __device__ inline std::int64_t skip_group(const DeviceProblem& problem, const WorkTile& tile, int group) {
  const std::int64_t of_head = (problem.seq_q + common::kSkipRows - 1) / common::kSkipRows;
  const std::int64_t head = std::int64_t{tile.batch} * problem.heads_q + tile.head;
  return head * of_head + tile.row / common::kSkipRows + group;
}

// Where the means of a block of queries begin, in [batch, heads_kv, means, d].
[[nodiscard]] __device__ inline std::int64_t key_means_at(const DeviceProblem& problem, std::int64_t b,
                                                          std::int64_t h_kv, std::int64_t block) {
  const std::int64_t means = problem.near.means;
  return ((b * problem.heads_kv + h_kv) * means + (means == 1 ? 0 : block)) * problem.head_dim;
}

}  // namespace distr::cuda
