// SPDX-License-Identifier: Apache-2.0
// Tiles [keys][columns] of k_hat that was made beforehand, or of K, come by TMA. A thread of the producer warpgroup
// issues all loads: q_hat, and then k_hat and V tile by tile.
#pragma once

#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

// What a consumer does beside a producer warpgroup to get tiles loaded: nothing.
struct NoLoads {
  template <class Pass>
  __device__ explicit NoLoads(const Pass& /*pass*/) {}
  __device__ void after_tile(int /*n*/) {}
};

template <class C>
class ConsumerLoads;

struct TmaKeys {
  static constexpr KeyLoad kLoad = KeyLoad::tma;
  static constexpr int kProducers = 1;
  static constexpr int stages(int /*values*/) { return 2; }
  static constexpr unsigned kArrivals = 1;       // that make a tile full: of the thread that issues TMA
  static constexpr unsigned kValueArrivals = 1;  // of V
  static constexpr bool kTransposed = false;
  static constexpr Registers registers(int consumers) {
    return consumers == 2 ? Registers{24, 240} : Registers{32, 160};
  }

  template <int kColumns, int kKeys>
  using KeyTile = Panels<kKeys, kColumns>;
  template <class C>
  using LoadsOfConsumer = NoLoads;
  template <class C>
  struct Storage {};
  struct Barriers {};

  template <class C>
  __device__ static void init_barriers(const Shared<C>& /*shared*/) {}

  // k_hat of tile n, as soon as a stage is free.
  template <class C>
  __device__ __forceinline__ static void load(const Pass<C>& pass, int n) {
    using Keys = typename C::KeyTile;
    const auto state = pass.state(n);
    const std::uint32_t full = pass.shared.keys_full(state.stage);
    wait_empty(pass.shared.keys_empty(state.stage), state.phase);
    ptx::barrier_arrive_expect_tx(full, Keys::kBytes);
    load_keys<C, Keys>(pass, n, pass.shared.keys(state.stage), pass.keys_map(), full, pass.keys_head(),
                       &BatchEntry::k_axis);
  }

  // What the producer warpgroup does in a pass.
  template <class C>
  __device__ static void produce(const Pass<C>& pass) {
    if (!is_first_warp() || !ptx::elect_one_sync()) {
      return;
    }
    if (pass.used == 0) {
      load_queries(pass);
    }
    load_tiles(pass);
    if (pass.used == 0) {
      prefetch_next<C>(pass.p);
    }
  }
  // By the thread that issues TMA.
  template <class C>
  __device__ __forceinline__ static void load_tiles(const Pass<C>& pass) {
#pragma unroll 1
    for (int n = 0; n < pass.tiles; ++n) {
      C::KeyLoader::load(pass, n);
      load_values(pass, n);
    }
  }

  template <class C>
  __device__ static void prefetch(const ForwardParameters& p, const WorkTile& next) {
    tma_prefetch_tile<typename C::KeyTile>(p.k, next.row, keys_head_of<C>(p, next), next.batch);
  }
};

// The same without a producer, so that two blocks have room on an SM: a thread of the first consumer issues TMA between
// its halves of tiles.
struct ConsumerTmaKeys : TmaKeys {
  static constexpr int kProducers = 0;
  static constexpr int stages(int /*values*/) { return 3; }
  template <class C>
  using LoadsOfConsumer = ConsumerLoads<C>;
};

template <class C>
class ConsumerLoads {
 public:
  __device__ __forceinline__ explicit ConsumerLoads(const Pass<C>& pass) : pass_(pass), loads_here_(is_first_warp()) {
    if (loads_here_ && ptx::elect_one_sync()) {
      if (pass.used == 0) {
        load_queries(pass);
      }
      for (int n = 0; n < min(C::kStages, pass.tiles); ++n) {
        load(n);
      }
    }
    __syncwarp();
  }

  // This warp is through with tile n, so the others soon will be with the one before, whose stages are free then.
  __device__ __forceinline__ void after_tile(int n) {
    const int next = n - 1 + C::kStages;
    if (loads_here_ && n > 0 && next < pass_.tiles && ptx::elect_one_sync()) {
      load(next);
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void load(int n) const {
    TmaKeys::load(pass_, n);
    load_values(pass_, n);
  }

  const Pass<C>& pass_;
  const bool loads_here_;
};

}  // namespace distr::cuda::sm90
