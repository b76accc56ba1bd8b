// SPDX-License-Identifier: Apache-2.0
// The tiles of a block of queries that skips far keys as it goes (voted_keys.cuh): those that are near one of its rows,
// and then those that are far of one; some are both.
#pragma once

#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

// Rows share near keys by kNearTile at least, and a block has rows of two such groups at most.
class VotedTiles {
 public:
  VotedTiles() = default;
  __device__ VotedTiles(const ForwardParameters& p, const WorkTile& work, int rows) {
    const std::int64_t last_row = min(std::int64_t{work.row} + rows, p.row_end) - 1;
    const std::int64_t keys = visible_keys(p.problem, last_row);
    near_ = near_tiles(p.problem, work.row, last_row, keys);
    // Near all rows, beside the sinks: what is near the first and the last.
    const NearTiles first = near_tiles(p.problem, work.row, keys);
    const NearTiles last = near_tiles(p.problem, last_row, keys);
    all_first_ = max(first.first, last.first);
    all_last_ = max(min(first.last, last.last), all_first_);
  }

  [[nodiscard]] __device__ int count_near() const { return near_.near_count(); }
  // Whether a tile is near one of the rows.
  [[nodiscard]] __device__ bool is_near(int tile) const { return near_.has(tile); }
  [[nodiscard]] __device__ int count() const {
    return count_near() + near_.end - near_.sinks - (all_last_ - all_first_);
  }
  // The one that is taken as the n-th.
  [[nodiscard]] __device__ int tile(int n) const {
    if (n < count_near()) {
      return near_.near(n);
    }
    const int far = near_.sinks + n - count_near();
    return far < all_first_ ? far : far + all_last_ - all_first_;
  }

 private:
  NearTiles near_;
  int all_first_, all_last_;
};

}  // namespace distr::cuda::sm90
