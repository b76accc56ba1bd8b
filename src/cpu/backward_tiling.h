// SPDX-License-Identifier: Apache-2.0
// How the backward cuts a problem: tiles of 128 queries at most, strips of 128 keys. All of it follows from the problem
// alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/tiling.h"

namespace distr::cpu {

// Strides of a contiguous gradient in the mask's shape, for [batch, heads_q, seq_q, seq_k]; 0 along axes that repeat.
[[nodiscard]] inline std::array<std::int64_t, 4> contiguous_mask_strides(const Mask& mask) {
  std::array<std::int64_t, 4> strides{};
  std::int64_t stride = 1;
  for (int axis = mask.rank - 1; axis >= 0; --axis) {
    const std::int64_t length = mask.shape[static_cast<std::size_t>(axis)];
    strides[static_cast<std::size_t>(4 - mask.rank + axis)] = length == 1 ? 0 : stride;
    stride *= length;
  }
  return strides;
}

// The elements of an axis that a task sums over: one of them, or all where the mask repeats along the axis.
struct MaskAxis {
  std::int64_t first, end;
  bool whole;
};

// The strips first .. last: those that some row of a tile sees, and where there are none, one.
struct Strips {
  Strips(const Problem& problem, const QueryTile& tile) {
    const common::KeySpan visible = common::visible_keys(problem, tile.first, tile.rows);
    last = std::max<std::int64_t>(0, common::ceil_div(visible.end, kTileKeys) - 1);
    first = std::min(visible.first / kTileKeys, last);
  }

  [[nodiscard]] bool has(std::int64_t strip) const { return first <= strip && strip <= last; }

  std::int64_t first, last;
};

struct MaskTask {
  MaskAxis batches, heads, tiles, strips;
};

// Where row n of a tile is among the rows of all heads.
[[nodiscard]] inline std::int64_t row_number(const Problem& problem, const QueryTile& tile, std::int64_t n) {
  return (tile.b * problem.heads_q + tile.h) * problem.seq_q + tile.first + n;
}

// A row of dq_hat: the sums by groups of columns, and behind them those of near keys by columns.
struct DqLayout {
  DqLayout(const Problem& problem, const Grouping& grouping)
      : has_near(common::has_near_keys(grouping)),
        near(has_near ? padded(problem.head_dim) : 0),
        stride(near + padded(problem.head_dim)) {}

  bool has_near;
  std::int64_t near;  // where the latter begin
  std::int64_t stride;
};

class BackwardTiling {
 public:
  BackwardTiling(const Problem& problem, const Grouping& grouping)
      : problem_(problem),
        tiles_(problem, grouping, kTileQueries),
        dq_stride_(DqLayout(problem, grouping).stride),
        strips_(std::max<std::int64_t>(1, common::ceil_div(problem.seq_k, kTileKeys))),
        mask_strides_(contiguous_mask_strides(problem.mask)) {}

  [[nodiscard]] std::int64_t num_tiles() const { return tiles_.num_tiles(); }
  [[nodiscard]] std::int64_t tiles_per_head() const { return tiles_.tiles_per_head(); }
  [[nodiscard]] QueryTile tile(std::int64_t index) const { return tiles_.tile(index); }
  // Of the first head; of no rows where heads have none.
  [[nodiscard]] QueryTile tile_of_head(std::int64_t index) const {
    return tiles_per_head() == 0 ? QueryTile{} : tiles_.tile(index);
  }

  [[nodiscard]] std::int64_t strips() const { return strips_; }
  [[nodiscard]] std::int64_t num_tasks() const { return problem_.batch * problem_.heads_kv * strips_; }

  // The shared part of the workspace: dq_hat [batch, heads_q, seq_q] rows, D of these rows, and a counter for each
  // tile.
  [[nodiscard]] std::int64_t d_at() const { return num_rows() * dq_stride_; }
  [[nodiscard]] std::int64_t turns_at() const { return d_at() + padded(num_rows()); }
  [[nodiscard]] std::int64_t shared_floats() const { return turns_at() + padded(num_tiles()); }

  [[nodiscard]] std::int64_t num_mask_tasks() const {
    return tasks_along(0, problem_.batch) * tasks_along(1, problem_.heads_q) * tasks_along(2, tiles_per_head()) *
           tasks_along(3, strips_);
  }
  [[nodiscard]] MaskTask mask_task(std::int64_t index) const {
    const MaskAxis strips = axis(index, 3, strips_);
    const MaskAxis tiles = axis(index, 2, tiles_per_head());
    const MaskAxis heads = axis(index, 1, problem_.heads_q);
    return {axis(index, 0, problem_.batch), heads, tiles, strips};
  }

 private:
  [[nodiscard]] std::int64_t num_rows() const { return problem_.batch * problem_.heads_q * problem_.seq_q; }
  [[nodiscard]] bool repeats(std::size_t mask_axis) const { return mask_strides_[mask_axis] == 0; }
  [[nodiscard]] std::int64_t tasks_along(std::size_t mask_axis, std::int64_t length) const {
    return repeats(mask_axis) ? 1 : length;
  }
  // Takes this axis' part off `index`.
  [[nodiscard]] MaskAxis axis(std::int64_t& index, std::size_t mask_axis, std::int64_t length) const {
    const std::int64_t tasks = tasks_along(mask_axis, length);
    const std::int64_t first = index % tasks;
    index /= tasks;
    return repeats(mask_axis) ? MaskAxis{0, length, true} : MaskAxis{first, first + 1, false};
  }

  const Problem& problem_;
  ForwardTiling tiles_;
  std::int64_t dq_stride_;
  std::int64_t strips_;
  std::array<std::int64_t, 4> mask_strides_;
};

// Rows of queries whose P and dS are computed together.
constexpr std::int64_t backward_rows_per_step(Products products) {
  return products == Products::of_pairs_in_tiles ? kBackwardRowsPerStepOfTiles : kRowsPerStep;
}

// Where a thread's tiles lie in its part of the workspace, in floats.
struct BackwardScratch {
  BackwardScratch(const Problem& problem, const Grouping& grouping, Products products) {
    const std::int64_t d = padded(problem.head_dim);
    const std::int64_t dv = padded(problem.head_dim_v);
    q_hat = take(kTileQueries * d);
    d_o = take(kTileQueries * dv);
    k_transposed = take(d * kTileKeys);
    k_hat = take(k_hat_floats(problem, grouping, products));
    k_hat_by_key = take(kTileKeys * d);
    v_transposed = take(dv * kTileKeys);
    p = take(kTileQueries * kTileKeys);
    d_s = take(kTileQueries * kTileKeys);
    dk_transposed = take(d * kTileKeys);
    dk_hat = take(d * kTileKeys);
    dv_transposed = take(dv * kTileKeys);
    if (products != Products::of_floats) {
      d_s_pairs = take(kTileQueries * kTileKeys);
      summed = take(kTileQueries / 2 * kTileKeys);
      summed_q_hat = take(kTileQueries / 2 * d);
      summed_d_o = take(kTileQueries / 2 * dv);
      k_hat_sums = take(is_exact(grouping) ? 0 : kTileKeys * d);
    }
    d_mask = take(problem.mask.kind == MaskKind::additive ? kTileQueries * kTileKeys : 0);
  }

  std::int64_t q_hat, d_o, k_transposed, k_hat, k_hat_by_key, v_transposed, p, d_s, dk_transposed, dk_hat,
      dv_transposed, d_mask;
  // Used by products of pairs alone.
  std::int64_t d_s_pairs = 0, summed = 0, summed_q_hat = 0, summed_d_o = 0, k_hat_sums = 0;
  std::int64_t total = 0;

 private:
  std::int64_t take(std::int64_t floats) {
    total += floats;
    return total - floats;
  }
};

}  // namespace distr::cpu
