// SPDX-License-Identifier: Apache-2.0
// The near keys of a thread block's queries, or all far ones (method, 8), for launches in which none is skipped: which
// they are follows from the block's rows, so tiles are whole, and the kernel goes through them as through all keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"

namespace distr::cuda::sm90 {

class KeyRuns {
 public:
  KeyRuns() = default;
  // row: the block's first, which has the others' near keys. seen: keys that any of its rows sees.
  __device__ KeyRuns(const DeviceProblem& problem, KeySet set, std::int64_t row, std::int64_t seen)
      : tiles_(near_tiles(problem, row, seen)),
        is_near_(set == KeySet::near),
        behind_(static_cast<int>((problem.seq_k + kTile - 1) / kTile)) {}

  // How many tiles of kNearTile keys there are, all or below a key.
  [[nodiscard]] __device__ int count() const { return below(tiles_.end); }
  [[nodiscard]] __device__ int count_below(std::int64_t key) const {
    return below(static_cast<int>(min(key / kTile, std::int64_t{tiles_.end})));
  }
  // The n-th key, in ascending order. pads: n may be behind the last one, and then so is the key behind all.
  template <class Pads>
  [[nodiscard]] __device__ __forceinline__ int key(int n, Pads pads) const {
    const int tile = n / kTile;
    const int found = is_near_ ? tiles_.near(tile) : tiles_.far(tile);
    return (!pads || tile < count() ? found : behind_) * kTile + n % kTile;
  }

 private:
  static constexpr int kTile = static_cast<int>(common::kNearTile);

  [[nodiscard]] __device__ int below(int tile) const {
    const int near = min(tiles_.sinks, tile) + min(max(tile - tiles_.first, 0), tiles_.last - tiles_.first);
    return is_near_ ? near : tile - near;
  }

  NearTiles tiles_;
  bool is_near_;
  int behind_;  // a tile that TMA fills with zeros
};

// Loaders of such keys.
template <class KeyLoader, KeyLoad kLoad_>
struct Runs : KeyLoader {
  static constexpr KeyLoad kLoad = kLoad_;
};

}  // namespace distr::cuda::sm90
