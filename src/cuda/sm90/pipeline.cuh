// SPDX-License-Identifier: Apache-2.0
// Tiles that the copy engine brings to rings of buffers in shared memory.
#pragma once

#include "cuda/sm90/config.h"
#include "cuda/sm90/ptx.cuh"

namespace distr::cuda::sm90 {

// The n-th use of a ring of Ring::kStages buffers.
template <class Ring>
struct Turn {
  int stage;
  unsigned parity;  // of the phase that its use ends
  __device__ explicit Turn(int n) : stage(n % Ring::kStages), parity(static_cast<unsigned>(n / Ring::kStages) % 2) {}
};

template <class P>
__device__ inline void copy_tile(std::uint32_t tile, const CUtensorMap& map, std::uint32_t barrier, int row, int head,
                                 int batch) {
#pragma unroll
  for (int panel = 0; panel < P::kCount; ++panel) {
    ptx::copy_box(tile + static_cast<std::uint32_t>(panel * P::kPanelBytes), map, barrier, panel * P::kPanelColumns,
                  row, head, batch);
  }
}

template <class P>
__device__ inline void prefetch_tile(const CUtensorMap& map, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < P::kCount; ++panel) {
    ptx::prefetch_box(map, panel * P::kPanelColumns, row, head, batch);
  }
}

}  // namespace distr::cuda::sm90
