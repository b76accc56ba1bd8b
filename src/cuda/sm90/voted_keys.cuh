// SPDX-License-Identifier: Apache-2.0
// The loader of attention that skips far halves of tiles (method, 8).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tma_keys.cuh"
#include "cuda/sm90/voted_tiles.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

// One thread loads queries, K and V. Values of tiles that nobody keeps are loaded as well: a consumer would wait for
// them behind its vote (docs/kernel-log.md, sm90/forward, step 79). Consumers free such values unseen. So the thread
// waits for a stage's values itself before it asks for the keys of the tile that has the stage next, and consumers free
// values when they have the keys of the next tile, which are asked for behind these values: each barrier's phases come
// one after the other, and by one thread, since of two one might find that a barrier is two phases further.
struct VotedExactKeys : TmaKeys {
  static constexpr KeyLoad kLoad = KeyLoad::voted_exact;
  static constexpr int stages(int /*values*/) { return 3; }
  // Of two consumers, whose block shares an SM, or of three.
  static constexpr Registers registers(int consumers) {
    return consumers == 2 ? Registers{32, 104} : Registers{32, 160};
  }
  template <class C>
  struct Storage {
    WorkTile work;
    VotedTiles<C::kConsumers> all;
    std::uint32_t tiles[C::kStages];  // VotedTile::bits()
  };

  template <class C>
  __device__ static void produce(const Pass<C>& pass) {
    if (!is_first_warp() || !ptx::elect_one_sync()) {
      return;
    }
    load_queries(pass);
    C::KeyLoader::load_far_queries(pass);
    pass.shared.storage.loader.all.for_each([&](int n, int tile) {
      wait_for_values_before(pass, n);
      load(pass, n, tile);
      C::Stages::values([&] { load_values(pass, n, tile); });
    });
    prefetch_next<C>(pass.p);
    for (int n = max(pass.tiles, C::kStages); n < pass.tiles + C::kStages; ++n) {
      wait_for_values_before(pass, n);  // a block must not end before its copies
    }
  }

  template <class C>
  __device__ static void load_far_queries(const Pass<C>& /*pass*/) {}

 private:
  // Until the values that had tile n's stage before are there.
  template <class C>
  __device__ __forceinline__ static void wait_for_values_before(const Pass<C>& pass, int n) {
    if (n >= C::kStages) {
      const auto state = pass.state(n - C::kStages);
      C::Stages::values([&] { ptx::barrier_wait(pass.shared.values_full(state.stage), state.phase); });
    }
  }

  template <class C>
  __device__ __forceinline__ static void load(const Pass<C>& pass, int n, int tile) {
    const auto state = pass.state(n);
    auto& loader = pass.shared.storage.loader;
    wait_empty(pass.shared.keys_empty(state.stage), state.phase);
    if (n < pass.keys.special) {
      loader.tiles[state.stage] = loader.all.described(n, tile).bits();
    }
    if constexpr (C::kFarIsNarrower) {
      if (n >= pass.keys.near) {
        load<typename C::KeyTile>(pass, state.stage, pass.p.far_k, pass.work.head, tile);
        return;
      }
    }
    load<typename C::NearKeyTile>(pass, state.stage, pass.p.k, pass.work.head_kv, tile);
  }
  template <class Tile, class C>
  __device__ __forceinline__ static void load(const Pass<C>& pass, int stage, const CUtensorMap& map, int head,
                                              int tile) {
    const std::uint32_t full = pass.shared.keys_full(stage);
    ptx::barrier_arrive_expect_tx(full, Tile::kBytes);
    tma_load_tile<Tile>(pass.shared.keys(stage), map, full, tile * C::kKeys, head, pass.work.batch);
  }

  template <class C>
  __device__ __forceinline__ static void load_values(const Pass<C>& pass, int n, int tile) {
    const auto state = pass.state(n);
    const std::uint32_t full = pass.shared.values_full(state.stage);
    wait_empty(pass.shared.values_empty(state.stage), state.phase);
    ptx::barrier_arrive_expect_tx(full, C::ValueTile::kBytes);
    tma_load_tile<typename C::ValueTile>(pass.shared.values(state.stage), pass.p.v, full, tile * C::kKeys,
                                         pass.work.head_kv, pass.work.batch);
  }
};

// The same where far keys have queries of their own, Q~, which lie behind those of near ones.
struct VotedKeys : VotedExactKeys {
  static constexpr KeyLoad kLoad = KeyLoad::voted;
  static constexpr int stages(int /*values*/) { return 2; }
  struct Barriers {
    Barrier far_queries_full;
  };

  template <class C>
  __device__ static void init_barriers(const Shared<C>& shared) {
    ptx::barrier_init(far_queries_full(shared), 1);
  }
  template <class C>
  __device__ static void wait_for_far_queries(const Shared<C>& shared) {
    ptx::barrier_wait(far_queries_full(shared), 0);
  }
  template <class C>
  __device__ static void load_far_queries(const Pass<C>& pass) {
    load_queries<typename C::QueryTile>(pass, pass.p.far_q, far_queries_full(pass.shared), C::kConsumers);
  }

 private:
  template <class C>
  [[nodiscard]] __device__ static std::uint32_t far_queries_full(const Shared<C>& shared) {
    return shared.loader_barrier(offsetof(Barriers, far_queries_full), 0);
  }
};

// The same where far keys are k_hat, of each query head, which was made beforehand: one grouping for the whole
// sequence.
struct VotedGroupedKeys : VotedKeys {
  static constexpr KeyLoad kLoad = KeyLoad::voted_grouped;

  template <class C>
  __device__ static void prefetch(const ForwardParameters& p, const WorkTile& next) {
    tma_prefetch_tile<typename C::NearKeyTile>(p.k, next.row, next.head_kv, next.batch);
    tma_prefetch_tile<typename C::KeyTile>(p.far_k, next.row, next.head, next.batch);
  }
};

}  // namespace distr::cuda::sm90
