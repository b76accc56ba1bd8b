// SPDX-License-Identifier: Apache-2.0
// Key loaders of launches that take some of the keys, in halves of tiles that a list names (key_list.cuh).
#pragma once

#include <cstdint>

#include "cuda/sm90/config.h"
#include "cuda/sm90/gather_keys.cuh"
#include "cuda/sm90/key_list.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/tma_keys.cuh"

namespace distr::cuda::sm90 {

template <class C>
inline constexpr int kHalvesOfTile = C::kKeys / kHalfKeys;

// One of the tile's halves to its place in a tile whose rows are keys, of its panels those from first to last - 1.
template <class Tile>
__device__ __forceinline__ void load_half(std::uint32_t tile, int half, int first, int last, const CUtensorMap& map,
                                          std::uint32_t full, int first_key, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < Tile::kCount; ++panel) {
    if (panel >= first && panel < last) {
      ptx::tma_load(tile + static_cast<std::uint32_t>(panel * Tile::kPanelBytes + half * kHalfKeys * Tile::kRowBytes),
                    map, full, panel * Tile::kPanelColumns, first_key, head, batch);
    }
  }
}

// The halves of a tile, for its consumers, by one thread that then arrives at the tile's full barrier.
template <class C>
__device__ __forceinline__ void publish_halves(const Pass<C>& pass, int stage,
                                               const ListedHalf (&halves)[kHalvesOfTile<C>]) {
#pragma unroll
  for (int i = 0; i < kHalvesOfTile<C>; ++i) {
    pass.shared.storage.loader.halves[stage][i] = halves[i].bits();
  }
}

[[nodiscard]] __device__ __forceinline__ int warp_of_producer() { return uniform(static_cast<int>(threadIdx.x) / 32); }

// A thread that asks TMA for a copy waits until it is taken in, and a tile comes in many copies. So all four warps ask:
// two for a part of K each, two for one of V.
struct ListedTmaKeys : TmaKeys {
  static constexpr KeyLoad kLoad = KeyLoad::listed_tma;
  static constexpr unsigned kArrivals = 2, kValueArrivals = 2;
  static constexpr Registers registers(int /*consumers*/) { return {40, 232}; }
  static constexpr int stages(int /*values*/) { return 3; }
  template <class C>
  struct Storage {
    unsigned halves[C::kStages][kHalvesOfTile<C>];  // that a stage has
  };

  template <class C>
  __device__ static void produce(const Pass<C>& pass) {
    const int warp = warp_of_producer();
    if (!ptx::elect_one_sync()) {
      return;
    }
    if (pass.used == 0 && warp == 0) {
      load_queries(pass);
    }
    const int part = warp % 2;
    KeyListReader reader(KeyList(pass.p, pass.work));
#pragma unroll 1
    for (int n = 0; n < pass.tiles; ++n) {
      ListedHalf halves[kHalvesOfTile<C>];
      reader.next(halves);
      const auto state = pass.state(n);
      if (warp < 2) {
        const std::uint32_t full = pass.shared.keys_full(state.stage);
        wait_empty(pass.shared.keys_empty(state.stage), state.phase);
        if (part == 0) {
          publish_halves(pass, state.stage, halves);
        }
        load_part<C, typename C::KeyTile>(pass.shared.keys(state.stage), full, part, halves, pass.p.k, pass.work);
      } else {
        C::Stages::values([&] {
          const std::uint32_t full = pass.shared.values_full(state.stage);
          wait_empty(pass.shared.values_empty(state.stage), state.phase);
          load_part<C, typename C::ValueTile>(pass.shared.values(state.stage), full, part, halves, pass.p.v, pass.work);
        });
      }
    }
    if (pass.used == 0 && warp == 0) {
      prefetch_next<C>(pass.p);
    }
  }

 private:
  // Half of the tile's keys.
  template <class C, class Tile>
  __device__ __forceinline__ static void load_part(std::uint32_t tile, std::uint32_t full, int part,
                                                   const ListedHalf (&halves)[kHalvesOfTile<C>], const CUtensorMap& map,
                                                   const WorkTile& work) {
    ptx::barrier_arrive_expect_tx(full, Tile::kBytes / 2);
#pragma unroll
    for (int i = 0; i < kHalvesOfTile<C>; ++i) {
      if (i / (kHalvesOfTile<C> / 2) == part) {
        load_half<Tile>(tile, i, 0, Tile::kCount, map, full, halves[i].first_key(), work.head_kv, work.batch);
      }
    }
  }
};

// All warps gather, and each asks for a panel of a half of V.
struct ListedGatherKeys : GatherKeys {
  static constexpr KeyLoad kLoad = KeyLoad::listed_gather;
  static constexpr int stages(int /*values*/) { return 4; }
  static constexpr unsigned kValueArrivals = 4;
  template <class C>
  struct Storage {
    unsigned row_of[C::kColumns];
    unsigned halves[C::kStages][kHalvesOfTile<C>];
  };

  template <class C>
  __device__ static void produce(const Pass<C>& pass) {
    static_assert(kHalvesOfTile<C> == 2 && C::ValueTile::kCount == 2);
    const int warp = warp_of_producer();
    const bool issues = ptx::elect_one_sync();
    if (pass.used == 0 && warp == 0 && issues) {
      load_queries(pass);
    }
    Gatherer<C> gatherer(pass);
    KeyListReader reader(KeyList(pass.p, pass.work));
#pragma unroll 1
    for (int n = 0; n < pass.tiles; ++n) {
      ListedHalf halves[2];
      reader.next(halves);
      const auto state = pass.state(n);
      wait_empty(pass.shared.keys_empty(state.stage), state.phase);
      if (warp == 0 && issues) {
        publish_halves(pass, state.stage, halves);  // the warp arrives later
      }
      constexpr int kChunks = kHalfKeys / kChunk;
      const int first_keys[2] = {halves[0].first_key(), halves[1].first_key()};
      gatherer.load(state.stage, [&](int chunk) {
        return (chunk < kChunks ? first_keys[0] : first_keys[1]) + chunk % kChunks * kChunk;
      });
      if (issues) {
        C::Stages::values([&] {
          const std::uint32_t full = pass.shared.values_full(state.stage);
          wait_empty(pass.shared.values_empty(state.stage), state.phase);
          ptx::barrier_arrive_expect_tx(full, C::ValueTile::kBytes / 4);
          load_half<typename C::ValueTile>(pass.shared.values(state.stage), warp / 2, warp % 2, warp % 2 + 1, pass.p.v,
                                           full, warp < 2 ? first_keys[0] : first_keys[1], pass.work.head_kv,
                                           pass.work.batch);
        });
      }
      __syncwarp();
    }
    gatherer.finish();
    if (pass.used == 0 && warp == 0 && issues) {
      prefetch_next<C>(pass.p);
    }
  }
};

// What a consumer hides of its part of a tile: halves that the list does not name. It reads them before the tile is
// freed.
template <class C>
class HiddenHalves {
 public:
  // first: of the part's keys in the tile.
  __device__ __forceinline__ HiddenHalves(const Pass<C>& pass, const TileInRing<C>& tile, int first)
      : has_mask_(tile.n < pass.masked) {
    const int stage = tile.state().stage;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const unsigned* const bits = &pass.shared.storage.loader.halves[stage][first / kHalfKeys + i];
      halves_[i] = ListedHalf(uniform(threadIdx.x % 32 == 0 ? *bits : 0));  // by the lane that frees the tile
    }
  }

  // Scores become -infinity. By a branch that is seldom taken: a choice for every score costs a tenth of the kernel.
  __device__ __forceinline__ void hide(float (&s)[C::kHalf / 2]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!halves_[i].is_listed()) {
#pragma unroll
        for (int j = 0; j < kHalfKeys / 2; ++j) {
          s[i * kHalfKeys / 2 + j] = ptx::opaque(-INFINITY);
        }
      }
    }
  }
  // And so do those of keys that a row does not see. row: the thread's first.
  __device__ __forceinline__ void hide_with_mask(float (&s)[C::kHalf / 2], const DeviceProblem& problem,
                                                 int row) const {
    hide(s);
    if (has_mask_) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        apply_mask<kHalfKeys>(s, i * kHalfKeys / 2, problem, row, halves_[i].first_key());
      }
    }
  }

 private:
  static constexpr int kCount = C::kHalf / kHalfKeys;
  ListedHalf halves_[kCount];
  bool has_mask_;
};

}  // namespace distr::cuda::sm90
