// SPDX-License-Identifier: Apache-2.0
// The near keys of a thread block's queries, or all far ones (method, 8), for launches in which none is skipped: which
// they are follows from the block's rows, so tiles are whole, and the kernel goes through them as through all keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/key_band.cuh"

namespace distr::cuda::sm90 {

template <int kKeys>
class KeyRuns {
 public:
  KeyRuns() = default;
  // The block's first row has the others' near keys. rows, row_end: as KeyBand's.
  __device__ KeyRuns(const DeviceProblem& problem, KeySet set, const WorkTile& work, int rows, std::int64_t row_end)
      : tiles_(near_tiles(problem, work.row, seen_keys(problem, work, rows, row_end))),
        is_near_(set == KeySet::near),
        behind_(static_cast<int>((problem.seq_k + kTile - 1) / kTile)) {
    constexpr int kOfTile = kKeys / kTile;
    const std::int64_t last_row = min(std::int64_t{work.row} + rows, row_end) - 1;
    const int count = (below(tiles_.end) + kOfTile - 1) / kOfTile;  // the last one is filled up with keys behind all
    const int unmasked = count_below(visible_keys(problem, work.row) / kTile) / kOfTile;
    const std::int64_t whole = (first_visible_key(problem, last_row) + kTile - 1) / kTile;
    order_ = TileOrder(count, count - unmasked, (count_below(whole) + kOfTile - 1) / kOfTile);
  }

  // Tiles of kKeys keys, and of the first ones those with keys that one of the rows does not see.
  [[nodiscard]] __device__ int count() const { return order_.count(); }
  [[nodiscard]] __device__ int masked() const { return order_.masked(); }
  // Of tile n, the key at `first`, which is a multiple of kNearTile or lies in a tile that is.
  [[nodiscard]] __device__ __forceinline__ int key(int n, int first) const {
    const int at = (count() - 1 - order_.behind(n)) * kKeys + first;  // of the run's keys, in ascending order
    const int tile = at / kTile;
    const int found = is_near_ ? tiles_.near(tile) : tiles_.far(tile);
    return (kKeys == kTile || tile < below(tiles_.end) ? found : behind_) * kTile + at % kTile;
  }

 private:
  static constexpr int kTile = static_cast<int>(common::kNearTile);

  // How many of the run's tiles of kNearTile keys lie below one.
  [[nodiscard]] __device__ int below(int tile) const {
    const int near =
        max(min(tiles_.sinks, tile) - tiles_.begin, 0) + min(max(tile - tiles_.first, 0), tiles_.last - tiles_.first);
    return is_near_ ? near : max(tile - tiles_.begin, 0) - near;
  }
  [[nodiscard]] __device__ int count_below(std::int64_t tile) const {
    return below(static_cast<int>(min(tile, std::int64_t{tiles_.end})));
  }

  NearTiles tiles_;
  bool is_near_;
  int behind_;  // a tile that TMA fills with zeros
  TileOrder order_;
};

// Loaders of such keys.
template <class KeyLoader, KeyLoad kLoad_>
struct Runs : KeyLoader {
  static constexpr KeyLoad kLoad = kLoad_;
};

}  // namespace distr::cuda::sm90
