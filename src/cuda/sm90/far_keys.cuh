// SPDX-License-Identifier: Apache-2.0
// All far keys of a thread block's queries (method, 8), for launches in which none of them is skipped: which they are
// follows from the block's rows, so tiles are whole, and the kernel goes through them as through all keys. The launch
// of near keys came before, and the epilogue takes its result in (near_result.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"

namespace distr::cuda::sm90 {

struct NoFarKeys {};

class FarKeys {
 public:
  FarKeys() = default;
  // row: the block's first, which has the others' near keys. seen: keys that any of its rows sees.
  __device__ FarKeys(const DeviceProblem& problem, std::int64_t row, std::int64_t seen)
      : tiles_(near_tiles(problem, row, seen)), behind_(static_cast<int>((problem.seq_k + kTile - 1) / kTile)) {}

  // How many tiles of kNearTile keys there are, all or below a key.
  [[nodiscard]] __device__ int count() const { return below(tiles_.end); }
  [[nodiscard]] __device__ int count_below(std::int64_t key) const {
    return below(static_cast<int>(min(key / kTile, std::int64_t{tiles_.end})));
  }
  // The n-th far key, in ascending order. pads: n may be behind the last one, and then so is the key behind all.
  template <class Pads>
  [[nodiscard]] __device__ __forceinline__ int key(int n, Pads pads) const {
    const int tile = n / kTile;
    return (!pads || tile < count() ? tiles_.far(tile) : behind_) * kTile + n % kTile;
  }

 private:
  static constexpr int kTile = static_cast<int>(common::kNearTile);

  [[nodiscard]] __device__ int below(int tile) const {
    return tile - min(tiles_.sinks, tile) - min(max(tile - tiles_.first, 0), tiles_.last - tiles_.first);
  }

  NearTiles tiles_;
  int behind_;  // a tile that TMA fills with zeros
};

// Loaders of far keys alone.
template <class KeyLoader, KeyLoad kLoad_>
struct Far : KeyLoader {
  static constexpr KeyLoad kLoad = kLoad_;
};

}  // namespace distr::cuda::sm90
