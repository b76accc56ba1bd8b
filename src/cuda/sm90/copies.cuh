// SPDX-License-Identifier: Apache-2.0
// Who fills the rings of tiles (ring.cuh): the first warpgroup of a thread block, or a thread of a consumer. Where the
// first warpgroup sums columns of K (summed_keys.cuh), two threads of the last one copy.
#pragma once

#include <type_traits>

#include "cuda/rows.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/picked_keys.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/ring.cuh"

namespace distr::cuda::sm90 {

// Tiles [keys][columns] of k_hat that was made beforehand, or of K, by one thread.
template <class C>
class CopiedKeys {
 public:
  static constexpr bool kByOneThread = true;

  __device__ CopiedKeys(const ForwardParameters& p, const Rows& work) : p_(p), work_(work) {}

  __device__ void fill(std::uint32_t tile, std::uint32_t full, int row) {
    ptx::barrier_arrive_expect(full, C::KeyTile::kBytes);
    copy_tile<typename C::KeyTile>(tile, p_.k, full, row, p_.keys_of_query_head ? work_.head : work_.head_kv,
                                   work_.batch);
  }

  __device__ void finish() {}

 private:
  const ForwardParameters& p_;
  const Rows& work_;
};

template <class C>
using Keys = std::conditional_t<C::kPicks, PickedKeys<C>, CopiedKeys<C>>;

// That make a tile of k_hat full: of the copying thread, or of the warps that make it.
template <class C>
inline constexpr unsigned kArrivals = C::kSums || C::kPicks ? C::kWarpgroup / 32 : 1;

template <class C>
__device__ inline void copy_queries(const ForwardParameters& p, const Rows& work, const Shared<C>& shared) {
  ptx::barrier_arrive_expect(shared.queries_full(), C::kConsumers * C::QueryTile::kBytes);
  for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
    copy_tile<typename C::QueryTile>(shared.queries(consumer), p.q, shared.queries_full(), work.row + 64 * consumer,
                                     work.head, work.batch);
  }
}

// V for the use-th use of its ring, as soon as the stage is empty. row: the first key.
template <class C>
__device__ __forceinline__ void copy_values(const ForwardParameters& p, const Rows& work, const Shared<C>& shared,
                                            int use, int row) {
  const Turn<C> turn(use);
  ptx::barrier_wait(shared.values_empty(turn.stage), turn.parity ^ 1);
  ptx::barrier_arrive_expect(shared.values_full(turn.stage), C::ValueTile::kBytes);
  copy_tile<typename C::ValueTile>(shared.values(turn.stage), p.v, shared.values_full(turn.stage), row, work.head_kv,
                                   work.batch);
}

// One pass over the tiles of keys, by one thread or the whole warpgroup (kByOneThread). They are taken from the last to
// the first, so that those with a mask come first.
template <class C>
class Copies {
 public:
  // `used`: tiles that went through the ring before.
  __device__ Copies(const ForwardParameters& p, const Rows& work, const Shared<C>& shared, int tiles, int used)
      : p_(p), work_(work), shared_(shared), tiles_(tiles), used_(used), keys_(p, work) {}

  // Fills the stage of tile n, as soon as it is empty.
  __device__ __forceinline__ void copy(int n) {
    const Turn<C> turn(used_ + n);
    const int row = (tiles_ - 1 - n) * C::kKeys;
    ptx::barrier_wait(shared_.keys_empty(turn.stage), turn.parity ^ 1);
    keys_.fill(shared_.keys(turn.stage), shared_.keys_full(turn.stage), row);
    if (C::kWithout != Without::values && (Keys<C>::kByOneThread || (is_first_warp() && ptx::elect()))) {
      copy_values<C>(p_, work_, shared_, used_ + n, row);
    }
  }

  __device__ void finish() { keys_.finish(); }
  [[nodiscard]] __device__ int tiles() const { return tiles_; }

 private:
  const ForwardParameters& p_;
  const Rows& work_;
  const Shared<C>& shared_;
  int tiles_, used_;
  Keys<C> keys_;
};

// Brings to the L2 what is read soon: the queries of the block that this SM has next, more or less, and of its head's
// keys and values those from the number of its first query on, so that a head's blocks together bring most of them.
template <class C>
__device__ inline void prefetch_next(const ForwardParameters& p) {
  const unsigned index = blockIdx.x + p.next_tile;
  if (index >= gridDim.x) {
    return;
  }
  const Rows next = p.tiles.at(index);
#pragma unroll
  for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
    prefetch_tile<typename C::QueryTile>(p.q, next.row + 64 * consumer, next.head, next.batch);
  }
  if (next.row < p.problem.seq_k) {
    if constexpr (!C::kPicks) {
      prefetch_tile<typename C::SourceTile>(p.k, next.row, p.keys_of_query_head ? next.head : next.head_kv, next.batch);
    }
    if constexpr (C::kWithout != Without::values) {
      prefetch_tile<typename C::ValueTile>(p.v, next.row, next.head_kv, next.batch);
    }
  }
}

// What a warpgroup that only copies does.
template <class C>
__device__ inline void copy_all(const ForwardParameters& p, const Rows& work, const Shared<C>& shared, int tiles,
                                int used) {
  const bool asks = is_first_warp() && ptx::elect();
  if (Keys<C>::kByOneThread && !asks) {
    return;
  }
  if (used == 0 && asks) {
    copy_queries<C>(p, work, shared);
  }
  Copies<C> copies(p, work, shared, tiles, used);
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    copies.copy(n);
    if constexpr (C::kPicks) {
      __syncwarp();
    }
  }
  copies.finish();
  if (used == 0 && asks) {
    prefetch_next<C>(p);
  }
}

// K for the use-th use of its ring, where its columns are summed.
template <class C>
__device__ __forceinline__ void copy_source(const ForwardParameters& p, const Rows& work, const Shared<C>& shared,
                                            int use, int row) {
  const Turn<typename C::Source> turn(use);
  ptx::barrier_wait(shared.source_empty(turn.stage), turn.parity ^ 1);
  ptx::barrier_arrive_expect(shared.source_full(turn.stage), C::SourceTile::kBytes);
  copy_tile<typename C::SourceTile>(shared.source(turn.stage), p.k, shared.source_full(turn.stage), row, work.head_kv,
                                    work.batch);
}

// What a warpgroup beside one that sums does: a thread copies q_hat and K, and one of another warp V. The engine takes
// in 16 KB in some 350 clocks, and a thread waits for that.
template <class C>
__device__ inline void ask_all(const ForwardParameters& p, const Rows& work, const Shared<C>& shared, int tiles,
                               int used) {
  static_assert(C::kWithout == Without::nothing);
  const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) % C::kWarpgroup / 32, 0);
  if (warp == 0 && ptx::elect()) {
    if (used == 0) {
      copy_queries<C>(p, work, shared);
    }
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      copy_source<C>(p, work, shared, used + n, (tiles - 1 - n) * C::kKeys);
    }
    if (used == 0) {
      prefetch_next<C>(p);
    }
  }
  if (warp == 1 && ptx::elect()) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      copy_values<C>(p, work, shared, used + n, (tiles - 1 - n) * C::kKeys);
    }
  }
}

// Where there is no such warpgroup: a thread of the first consumer copies, between its halves of tiles.
template <class C>
class OwnCopies {
  static_assert(Keys<C>::kByOneThread);

 public:
  __device__ __forceinline__ OwnCopies(const ForwardParameters& p, const Rows& work, const Shared<C>& shared, int tiles,
                                       int used)
      : copies_(p, work, shared, tiles, used), copies_here_(is_first_warp()) {
    if (copies_here_ && ptx::elect()) {
      if (used == 0) {
        copy_queries<C>(p, work, shared);
      }
      for (int n = 0; n < min(C::kStages, tiles); ++n) {
        copies_.copy(n);
      }
    }
    __syncwarp();
  }

  // This warp is through with tile n, so the others soon will be with the one before, which makes room.
  __device__ __forceinline__ void follow(int n) {
    const int next = n - 1 + C::kStages;
    if (copies_here_ && n > 0 && next < copies_.tiles() && ptx::elect()) {
      copies_.copy(next);
    }
    __syncwarp();
  }

 private:
  Copies<C> copies_;
  const bool copies_here_;
};

// What a consumer beside a warpgroup that copies does about it: nothing.
struct NoCopies {
  template <class Shared>
  __device__ NoCopies(const ForwardParameters& /*p*/, const Rows& /*work*/, const Shared& /*shared*/, int /*tiles*/,
                      int /*used*/) {}
  __device__ void follow(int /*n*/) {}
};

template <class C>
using CopiesBetween = std::conditional_t<C::kShares, OwnCopies<C>, NoCopies>;

}  // namespace distr::cuda::sm90
