// SPDX-License-Identifier: Apache-2.0
// Pipelines of tiles in shared memory between producers and consumers: TMA fills a stage and its full barrier says so;
// consumers free it by its empty barrier.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/ptx.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/ptx.cuh"

namespace distr::cuda::sm90 {

// Which stage the n-th use of a pipeline takes.
template <int kStages>
struct PipelineState {
  int stage;
  unsigned phase;  // of the stage's full barrier that this use ends, 0 or 1
  __device__ explicit PipelineState(int n) : stage(n % kStages), phase(static_cast<unsigned>(n / kStages) % 2) {}
  // To the next use.
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The same for all threads of a warp, which the compiler then knows.
template <class X>
[[nodiscard]] __device__ __forceinline__ X uniform(X x) {
  return __shfl_sync(~0U, x, 0);
}

// The addresses of what is in a kernel's Storage, as instructions take them. They are counted from one of the storage
// and one of its barriers that the compiler does not know: else it keeps many constants in registers.
template <class Storage>
class SharedAddresses {
 public:
  __device__ __forceinline__ explicit SharedAddresses(Storage& at)
      : storage(at),
        base_(uniform(ptx::shared_address(&at))),
        barriers_(uniform(static_cast<std::uint32_t>(base_ + offsetof(Storage, barriers)))) {}

  Storage& storage;

 protected:
  // Of one of several tiles of so many bytes, the first of which lies `offset` bytes behind the storage's beginning.
  [[nodiscard]] __device__ std::uint32_t tile(std::size_t offset, int bytes, int index) const {
    return base_ + static_cast<std::uint32_t>(offset) + static_cast<std::uint32_t>(index * bytes);
  }
  // The same for barriers, behind the first of them.
  [[nodiscard]] __device__ std::uint32_t barrier(std::size_t offset, int index = 0) const {
    return barriers_ + static_cast<std::uint32_t>(static_cast<int>(offset) + index * static_cast<int>(sizeof(Barrier)));
  }

 private:
  std::uint32_t base_;
  std::uint32_t barriers_;
};

// Until the stage is free. The first use of each waits for nothing.
__device__ __forceinline__ void wait_empty(std::uint32_t barrier, unsigned phase) {
  ptx::barrier_wait(barrier, phase ^ 1);
}
// By all threads of a warp, when it is through with what the barrier guards.
__device__ __forceinline__ void arrive_warp(std::uint32_t barrier) {
  if (threadIdx.x % 32 == 0) {
    ptx::barrier_arrive(barrier);
  }
}

// Whether it is the block's first warp, of which ptx::elect_one_sync() then names the thread that issues TMA. Of
// threadIdx.x == 0, and of both in one function, the compiler does not see that it is one thread: every load becomes a
// loop over the warp's.
__device__ inline bool is_first_warp() { return uniform(static_cast<int>(threadIdx.x) / 32) == 0; }

// axes: the coordinates behind the row, of the map's last axes.
template <class P, class... Axes>
__device__ inline void tma_load_tile(std::uint32_t tile, const CUtensorMap& map, std::uint32_t barrier, int row,
                                     Axes... axes) {
#pragma unroll
  for (int panel = 0; panel < P::kCount; ++panel) {
    ptx::tma_load(tile + static_cast<std::uint32_t>(panel * P::kPanelBytes), map, barrier, panel * P::kPanelColumns,
                  row, axes...);
  }
}
template <class P>
__device__ inline void tma_prefetch_tile(const CUtensorMap& map, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < P::kCount; ++panel) {
    ptx::tma_prefetch(map, panel * P::kPanelColumns, row, head, batch);
  }
}

}  // namespace distr::cuda::sm90
