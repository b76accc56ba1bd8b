// SPDX-License-Identifier: Apache-2.0
// The rings of tiles in shared memory, of k_hat, of V, and of K where its columns are summed, and their barriers.
#pragma once

#include <cstdint>

#include "cuda/sm90/config.h"
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
  [[nodiscard]] __device__ std::uint32_t source(int stage) const {
    return values(C::kStages) + static_cast<std::uint32_t>(stage * C::SourceTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t groups() const { return source(C::Source::kStages); }
  [[nodiscard]] __device__ std::uint32_t queries_full() const { return barriers; }
  [[nodiscard]] __device__ std::uint32_t keys_full(int stage) const { return barrier(0, stage); }
  [[nodiscard]] __device__ std::uint32_t keys_empty(int stage) const { return barrier(1, stage); }
  [[nodiscard]] __device__ std::uint32_t values_full(int stage) const { return barrier(2, stage); }
  [[nodiscard]] __device__ std::uint32_t values_empty(int stage) const { return barrier(3, stage); }
  [[nodiscard]] __device__ std::uint32_t source_full(int stage) const { return barrier(4, stage); }
  [[nodiscard]] __device__ std::uint32_t source_empty(int stage) const {
    return barrier(4, C::Source::kStages + stage);
  }

  static constexpr int kBarriers = 1 + 4 * C::kStages + 2 * C::Source::kStages;

 private:
  [[nodiscard]] __device__ std::uint32_t barrier(int kind, int stage) const {
    return barriers + static_cast<std::uint32_t>(8 * (1 + kind * C::kStages + stage));
  }
};

// Whether it is the block's first warp, of which ptx::elect() then names the thread that asks the copy engine. Of
// threadIdx.x == 0, and of both in one function, the compiler does not see that it is one thread: every copy becomes a
// loop over the warp's.
__device__ inline bool is_first_warp() { return __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32, 0) == 0; }

// A warp is through with what the barrier guards.
__device__ __forceinline__ void release(std::uint32_t barrier) {
  if (threadIdx.x % 32 == 0) {
    ptx::barrier_arrive(barrier);
  }
}

}  // namespace distr::cuda::sm90
