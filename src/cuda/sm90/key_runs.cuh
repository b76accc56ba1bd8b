// SPDX-License-Identifier: Apache-2.0
// The near keys of a thread block's queries, and all far ones (method, 8), for launches in which none is skipped: which
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
  // set: near or far. The block's first row has the others' near keys. rows, row_end: as KeyBand's.
  __device__ KeyRuns(const DeviceProblem& problem, KeySet set, const WorkTile& work, int rows, std::int64_t row_end)
      : behind_(static_cast<int>((problem.seq_k + kTile - 1) / kTile)) {
    const NearTiles tiles = near_tiles(problem, work.row, seen_keys(problem, work, rows, row_end));
    const bool near = set == KeySet::near;
    first_run_ = near ? tiles.sinks - tiles.begin : tiles.first - tiles.sinks;
    to_first_ = near ? tiles.begin : tiles.sinks;
    to_second_ = (near ? tiles.first : tiles.last) - first_run_;
    tiles_ = near ? tiles.near_count() : tiles.far_count();
    constexpr int kOfTile = kKeys / kTile;
    const std::int64_t last_row = min(std::int64_t{work.row} + rows, row_end) - 1;
    const int count = (tiles_ + kOfTile - 1) / kOfTile;  // the last one is filled up with keys behind all
    const int unmasked = below(visible_keys(problem, work.row) / kTile) / kOfTile;
    const int from_left = below((first_visible_key(problem, last_row) + kTile - 1) / kTile);
    order_ = TileOrder(count, count - unmasked, (from_left + kOfTile - 1) / kOfTile);
  }

  // Tiles of kKeys keys, and of the first ones those with keys that one of the rows does not see.
  [[nodiscard]] __device__ int count() const { return order_.count(); }
  [[nodiscard]] __device__ int masked() const { return order_.masked(); }
  // Of tile n, the key at `first`, a multiple of kNearTile or a part of one.
  [[nodiscard]] __device__ __forceinline__ int key(int n, int first) const {
    const int at = order_.tile(n, order_.count() - 1) * kKeys + first;  // of the runs' keys, in ascending order
    const int tile = at / kTile;
    const int found = tile + (tile < first_run_ ? to_first_ : to_second_);
    return (kKeys == kTile || tile < tiles_ ? found : behind_) * kTile + at % kTile;
  }

 private:
  static constexpr int kTile = static_cast<int>(common::kNearTile);

  // How many of the runs' tiles of kNearTile keys have a lower number.
  [[nodiscard]] __device__ int below(std::int64_t number) const {
    const auto end = static_cast<int>(number);
    return max(min(end - to_first_, first_run_), 0) + max(min(end - to_second_, tiles_) - first_run_, 0);
  }

  int first_run_, tiles_;     // tiles of kNearTile keys, of the first run and of both
  int to_first_, to_second_;  // from their place in the runs to their number
  int behind_;                // a tile that TMA fills with zeros
  TileOrder order_;
};

// Loaders of such keys.
template <class KeyLoader, KeyLoad kLoad_>
struct Runs : KeyLoader {
  static constexpr KeyLoad kLoad = kLoad_;
};

}  // namespace distr::cuda::sm90
