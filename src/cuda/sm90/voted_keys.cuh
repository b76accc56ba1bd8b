// SPDX-License-Identifier: Apache-2.0
// The keys of exact attention that skips far halves of tiles (method, 8), and their loader. Tiles that are near one of
// the block's queries come first, then those that are far of one; some are both.
#pragma once

#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tma_keys.cuh"
#include "cuda/sm90/voted_tiles.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

// What consumers have to know of a tile, beside it in shared memory: its first key, whether it has keys that one of the
// block's rows does not see, and which consumers take it: each takes its near tiles among those that come first, and
// its far ones behind them.
class VotedTile {
 public:
  __device__ explicit VotedTile(std::uint32_t bits) : bits_(bits) {}
  __device__ VotedTile(int tile, bool has_mask, bool is_first_far)
      : bits_(static_cast<std::uint32_t>(tile) * kTile | (has_mask ? kMasked : 0) | (is_first_far ? kFirstFar : 0)) {}

  __device__ void take(int consumer) { bits_ |= 1U << consumer; }
  // Far from all rows, all of which see all of its keys.
  [[nodiscard]] __device__ static VotedTile plain(int tile, int consumers) {
    return VotedTile(static_cast<std::uint32_t>(tile) * kTile | kPlain | ((1U << consumers) - 1));
  }

  [[nodiscard]] __device__ std::uint32_t bits() const { return bits_; }
  [[nodiscard]] __device__ int first_key() const { return static_cast<int>(bits_ & ~(kTile - 1)); }
  [[nodiscard]] __device__ bool is_taken_by(int consumer) const { return (bits_ >> consumer & 1) != 0; }
  // Whether it is none of the special cases below; where that is not known, it is not.
  [[nodiscard]] __device__ bool is_plain() const { return (bits_ & kPlain) != 0; }
  [[nodiscard]] __device__ bool is_first_far() const { return (bits_ & kFirstFar) != 0; }
  [[nodiscard]] __device__ bool has_mask() const { return (bits_ & kMasked) != 0; }

 private:
  static constexpr std::uint32_t kTile = common::kNearTile;
  // Bits below the first key's are free.
  static constexpr std::uint32_t kMasked = kTile / 2, kFirstFar = kTile / 4, kPlain = kTile / 8;

  std::uint32_t bits_;
};

// What the tiles are to a block's rows, but for their order.
template <int kConsumers>
struct VotedRows {
  NearTiles near[kConsumers];        // of each consumer's rows
  bool exist[kConsumers];            // whether it has any
  int first_unmasked, end_unmasked;  // tiles whose keys all of the block's rows see

  // By each of the first threads, a consumer's part.
  __device__ void fill(const ForwardParameters& p, const WorkTile& work) {
    const auto consumer = static_cast<int>(threadIdx.x);
    if (consumer >= kConsumers) {
      return;
    }
    constexpr int kRows = 64 * kConsumers;
    const std::int64_t last_row = min(std::int64_t{work.row} + kRows, p.row_end) - 1;
    const std::int64_t row = std::int64_t{work.row} + consumer * 64;
    exist[consumer] = row <= last_row;
    near[consumer] = near_tiles(p.problem, min(row, last_row), visible_keys(p.problem, last_row));
    if (consumer == 0) {
      constexpr std::int64_t kTile = common::kNearTile;
      first_unmasked = static_cast<int>((first_visible_key(p.problem, last_row) + kTile - 1) / kTile);
      const bool has_all_rows = work.row + kRows <= p.row_end;
      end_unmasked = has_all_rows ? static_cast<int>(visible_keys(p.problem, work.row) / kTile) : 0;
    }
  }
  [[nodiscard]] __device__ VotedTile operator()(const VotedTiles& tiles, int n) const {
    const int tile = tiles.tile(n);
    const bool is_near = n < tiles.count_near();
    const bool has_mask = tile < first_unmasked || tile >= end_unmasked;
    if (n > tiles.count_near() && !has_mask && !tiles.is_near(tile)) {
      return VotedTile::plain(tile, kConsumers);  // soon, as the producer has a tile's time for it
    }
    VotedTile result(tile, has_mask, n == tiles.count_near());
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      if (exist[consumer] && near[consumer].has(tile) == is_near) {
        result.take(consumer);
      }
    }
    return result;
  }
};

// One thread loads Q, K and V. Values of tiles that nobody keeps are loaded as well: a consumer would wait for them
// behind its vote (docs/kernel-log.md, sm90/forward, step 79). Consumers free such values unseen. So the producer waits
// for a stage's values itself before it asks for the next keys there, and consumers free values when they have the keys
// of the next tile, which are asked for behind these values: each barrier's phases come one after the other.
struct VotedTmaKeys : TmaKeys {
  static constexpr KeyLoad kLoad = KeyLoad::voted;
  static constexpr int stages(int values) { return values <= 64 ? 6 : 2; }
  template <class C>
  struct Storage {
    std::uint32_t tiles[C::kStages];  // VotedTile::bits()
    VotedTiles block;
    VotedRows<C::kConsumers> rows;
  };

  template <class C>
  __device__ static void produce(const Pass<C>& pass) {
    if (!is_first_warp() || !ptx::elect_one_sync()) {
      return;
    }
    load_queries(pass);
#pragma unroll 1
    for (int n = 0; n < pass.tiles; ++n) {
      const VotedTile tile = pass.shared.storage.loader.rows(pass.keys, n);
      if (n >= C::kStages) {
        C::Stages::values([&] { wait_for_values(pass, n - C::kStages); });
      }
      load(pass, n, tile);
      load_values(pass, n);
    }
    prefetch_next<C>(pass.p);
    C::Stages::values([&] {
      for (int n = max(pass.tiles - C::kStages, 0); n < pass.tiles; ++n) {
        wait_for_values(pass, n);  // a block must not end before its copies
      }
    });
  }

 private:
  template <class C>
  __device__ __forceinline__ static void wait_for_values(const Pass<C>& pass, int n) {
    const auto state = pass.state(n);
    ptx::barrier_wait(pass.shared.values_full(state.stage), state.phase);
  }

  template <class C>
  __device__ __forceinline__ static void load(const Pass<C>& pass, int n, const VotedTile& tile) {
    const auto state = pass.state(n);
    const std::uint32_t full = pass.shared.keys_full(state.stage);
    wait_empty(pass.shared.keys_empty(state.stage), state.phase);
    pass.shared.storage.loader.tiles[state.stage] = tile.bits();
    ptx::barrier_arrive_expect_tx(full, C::KeyTile::kBytes);
    tma_load_tile<typename C::KeyTile>(pass.shared.keys(state.stage), pass.p.k, full, tile.first_key(),
                                       pass.work.head_kv, pass.work.batch);
  }
};

}  // namespace distr::cuda::sm90
