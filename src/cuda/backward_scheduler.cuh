// SPDX-License-Identifier: Apache-2.0
// The tile scheduler of the backward kernels: which tile of which head a thread block computes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace distr::cuda {

// The tile of a thread block. So many heads at a time are interleaved: thread blocks take the first tile of each of
// them, then the second of each, and so on, and then come the next heads.
struct TileCoord {
  int batch, head, tile;

  __device__ static TileCoord of(unsigned cta, int heads, std::int64_t batches, unsigned tiles, int interleaved) {
    const unsigned first = cta / (tiles * interleaved) * interleaved;
    const unsigned count = min(static_cast<unsigned>(heads * batches) - first, static_cast<unsigned>(interleaved));
    const unsigned index = cta - first * tiles;
    const int batch_head = static_cast<int>(first + index % count);
    return {batch_head / heads, batch_head % heads, static_cast<int>(index / count)};
  }
};

}  // namespace distr::cuda
