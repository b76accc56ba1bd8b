// SPDX-License-Identifier: Apache-2.0
// Which tile of which head belongs to a thread block of a backward kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace distr::cuda {

// The place of a thread block: section after section of heads, and in each the same tile of all heads, then the next.
struct Place {
  int batch, head, tile;

  __device__ static Place of(unsigned block, int heads, std::int64_t batches, unsigned tiles, int section) {
    const unsigned first = block / (tiles * section) * section;
    const unsigned count = min(static_cast<unsigned>(heads * batches) - first, static_cast<unsigned>(section));
    const unsigned index = block - first * tiles;
    const int batch_head = static_cast<int>(first + index % count);
    return {batch_head / heads, batch_head % heads, static_cast<int>(index / count)};
  }
};

}  // namespace distr::cuda
