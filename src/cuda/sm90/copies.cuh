// SPDX-License-Identifier: Apache-2.0
// What the first warpgroup of a thread block does: it fills the ring of tiles of k_hat and V in shared memory.
#pragma once

#include <type_traits>

#include "cuda/rows.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/fused_keys.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"

namespace distr::cuda::sm90 {

// Where things are in shared memory.
template <class C>
struct Shared {
  std::uint32_t base;
  std::uint32_t barriers;

  [[nodiscard]] __device__ std::uint32_t queries(int consumer) const {
    return base + static_cast<std::uint32_t>(consumer * C::QueryTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t keys(int stage) const {
    return queries(C::kConsumers) + static_cast<std::uint32_t>(stage * C::KeyTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t values(int stage) const {
    return keys(C::kStages) + static_cast<std::uint32_t>(stage * C::ValueTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t queries_full() const { return barriers; }
  [[nodiscard]] __device__ std::uint32_t keys_full(int stage) const { return barrier(0, stage); }
  [[nodiscard]] __device__ std::uint32_t keys_empty(int stage) const { return barrier(1, stage); }
  [[nodiscard]] __device__ std::uint32_t values_full(int stage) const { return barrier(2, stage); }
  [[nodiscard]] __device__ std::uint32_t values_empty(int stage) const { return barrier(3, stage); }

  static constexpr int kBarriers = 1 + 4 * C::kStages;

 private:
  [[nodiscard]] __device__ std::uint32_t barrier(int kind, int stage) const {
    return barriers + static_cast<std::uint32_t>(8 * (1 + kind * C::kStages + stage));
  }
};

// Tiles [keys][columns] of k_hat that was made beforehand, or of K, by one thread.
template <class C>
class CopiedKeys {
 public:
  static constexpr unsigned kThreads = 1;
  static constexpr unsigned kArrivals = 1;  // that make a tile full

  __device__ CopiedKeys(const ForwardParameters& p, const Rows& work, int /*row*/)
      : p_(p), batch_(work.batch), head_(p.keys_of_query_head ? work.head : work.head_kv) {}

  __device__ void fill(std::uint32_t tile, std::uint32_t full, int row) {
    ptx::barrier_arrive_expect(full, C::KeyTile::kBytes);
    copy_tile<typename C::KeyTile>(tile, p_.k, full, row, head_, batch_);
  }

 private:
  const ForwardParameters& p_;
  int batch_, head_;
};

template <class C>
using Keys = std::conditional_t<C::kMembers == 0, CopiedKeys<C>,
                                std::conditional_t<C::kMembers == 1, PickedKeys<C>, FusedKeys<C>>>;

// Tiles are taken from the last to the first, so that those with a mask come first.
template <class C>
__device__ inline void copy_all(const ForwardParameters& p, const Rows& work, const Shared<C>& shared, int tiles,
                                int used) {
  if (threadIdx.x >= Keys<C>::kThreads) {
    return;
  }
  const bool leads = threadIdx.x == 0;
  if (leads && used == 0) {
    ptx::barrier_arrive_expect(shared.queries_full(), C::kConsumers * C::QueryTile::kBytes);
    for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
      copy_tile<typename C::QueryTile>(shared.queries(consumer), p.q, shared.queries_full(), work.row + 64 * consumer,
                                       work.head, work.batch);
    }
  }
  Keys<C> keys(p, work, (tiles - 1) * C::kKeys);
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    const Turn<C> turn(used + n);
    const int row = (tiles - 1 - n) * C::kKeys;
    ptx::barrier_wait(shared.keys_empty(turn.stage), turn.parity ^ 1);
    keys.fill(shared.keys(turn.stage), shared.keys_full(turn.stage), row);
    if (leads && C::kWithout != Without::values) {
      ptx::barrier_wait(shared.values_empty(turn.stage), turn.parity ^ 1);
      ptx::barrier_arrive_expect(shared.values_full(turn.stage), C::ValueTile::kBytes);
      copy_tile<typename C::ValueTile>(shared.values(turn.stage), p.v, shared.values_full(turn.stage), row,
                                       work.head_kv, work.batch);
    }
    if constexpr (C::kFuses) {
      __syncwarp();
    }
  }
}

}  // namespace distr::cuda::sm90
