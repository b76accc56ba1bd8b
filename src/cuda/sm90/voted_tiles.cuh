// SPDX-License-Identifier: Apache-2.0
// The tiles of a block of queries that skips far keys as it goes (voted_keys.cuh): those that are near one of its rows,
// and then those that are far of one; some are both. Far ones that are neither come last.
#pragma once

#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

// What consumers have to know of a tile that is not far from all rows, all of which see all of its keys.
class VotedTile {
 public:
  __device__ explicit VotedTile(std::uint32_t bits) : bits_(bits) {}
  __device__ VotedTile(int tile, bool has_mask)
      : bits_(static_cast<std::uint32_t>(tile) * kTile | (has_mask ? kMasked : 0)) {}

  __device__ void take(int consumer) { bits_ |= 1U << consumer; }

  [[nodiscard]] __device__ std::uint32_t bits() const { return bits_; }
  [[nodiscard]] __device__ int first_key() const { return static_cast<int>(bits_ & ~(kTile - 1)); }
  // Each takes its near tiles among those that come first, and its far ones behind them.
  [[nodiscard]] __device__ bool is_taken_by(int consumer) const { return (bits_ >> consumer & 1) != 0; }
  // Whether it has keys that one of the block's rows does not see.
  [[nodiscard]] __device__ bool has_mask() const { return (bits_ & kMasked) != 0; }

 private:
  static constexpr std::uint32_t kTile = common::kNearTile;
  static constexpr std::uint32_t kMasked = kTile / 2;  // bits below the first key's are free

  std::uint32_t bits_;
};

// Rows share near keys by kNearTile at least, and a block has rows of two such groups at most.
template <int kConsumers>
class VotedTiles {
 public:
  // By one thread.
  __device__ void fill(const ForwardParameters& p, const WorkTile& work) {
    constexpr std::int64_t kTile = common::kNearTile;
    constexpr int kRows = 64 * kConsumers;
    const std::int64_t last_row = min(std::int64_t{work.row} + kRows, p.row_end) - 1;
    const std::int64_t keys = visible_keys(p.problem, last_row);
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const std::int64_t row = std::int64_t{work.row} + consumer * 64;
      exist_[consumer] = row <= last_row;
      near_[consumer] = near_tiles(p.problem, min(row, last_row), keys);
    }
    const bool has_all_rows = work.row + kRows <= p.row_end;  // else all tiles have a mask, for rows that do not exist
    first_unmasked_ = static_cast<int>((first_visible_key(p.problem, last_row) + kTile - 1) / kTile);
    end_unmasked_ = has_all_rows ? static_cast<int>(visible_keys(p.problem, work.row) / kTile) : 0;

    const NearTiles of_any = near_tiles(p.problem, work.row, last_row, keys);
    // Near all rows, beside the sinks: what is near the first and the last.
    const int all_first = max(near_[0].first, near_[kConsumers - 1].first);
    const int all_last = max(min(near_[0].last, near_[kConsumers - 1].last), all_first);
    // Far from all rows, and without a mask: before the window and behind it.
    const int before = min(max(of_any.sinks, first_unmasked_), of_any.first);
    const int before_end = max(min(of_any.first, end_unmasked_), before);
    const int behind = min(max(of_any.last, first_unmasked_), of_any.end);
    const int behind_end = max(min(of_any.end, end_unmasked_), behind);
    const Run runs[kRuns] = {{of_any.begin, of_any.sinks}, {of_any.first, of_any.last}, {of_any.sinks, before},
                             {before_end, all_first},      {all_last, behind},          {behind_end, of_any.end},
                             {before, before_end},         {behind, behind_end}};
    near_count_ = special_count_ = count_ = 0;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      runs_[i] = runs[i];
      const int tiles = max(runs[i].end - runs[i].first, 0);
      near_count_ += i < 2 ? tiles : 0;
      special_count_ += i < 6 ? tiles : 0;
      count_ += tiles;
    }
    special_count_ = min(max(special_count_, near_count_ + 1), count_);
  }

  [[nodiscard]] __device__ int count() const { return count_; }
  [[nodiscard]] __device__ int count_near() const { return near_count_; }
  // Of the first ones, those that consumers have to know something of: the first far one is among them.
  [[nodiscard]] __device__ int count_special() const { return special_count_; }

  // Calls visit(n, tile) for all of them, tile being the n-th one's number.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    int n = 0;
#pragma unroll 1
    for (const Run& run : runs_) {
#pragma unroll 1
      for (int tile = run.first; tile < run.end; ++tile) {
        visit(n++, tile);
      }
    }
  }

  // The n-th, whose number is `tile`.
  [[nodiscard]] __device__ VotedTile described(int n, int tile) const {
    VotedTile result(tile, tile < first_unmasked_ || tile >= end_unmasked_);
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      if (exist_[consumer] && near_[consumer].has(tile) == (n < near_count_)) {
        result.take(consumer);
      }
    }
    return result;
  }

 private:
  struct Run {
    int first, end;
  };
  static constexpr int kRuns = 8;

  Run runs_[kRuns];  // near ones, other special ones, all others
  int near_count_, special_count_, count_;
  NearTiles near_[kConsumers];         // of each consumer's rows
  bool exist_[kConsumers];             // whether it has any
  int first_unmasked_, end_unmasked_;  // tiles whose keys all of the block's rows see
};

}  // namespace distr::cuda::sm90
