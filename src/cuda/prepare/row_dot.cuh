// SPDX-License-Identifier: Apache-2.0
// The inner product of two rows in memory, by eight lanes.
#pragma once

#include "cuda/tile.cuh"

namespace distr::cuda {

inline constexpr int kRowLanes = 8;  // of a row

// Eight elements, as loads of 16 bytes.
template <class T>
struct Chunk {
  uint4 words[kChunk * sizeof(T) / sizeof(uint4)];
};

// The sum of x[c] * y[c] over the row in fp32, in all of its lanes. aligned: both begin at a multiple of 16 bytes.
template <class X, class Y>
[[nodiscard]] __device__ float row_dot(const X* x, const Y* y, int columns, bool aligned) {
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int chunks = aligned ? columns / kChunk : 0;
  float sum = 0;
  for (int chunk = lane; chunk < chunks; chunk += kRowLanes) {
    const Chunk<X> of_x = reinterpret_cast<const Chunk<X>*>(x)[chunk];
    const Chunk<Y> of_y = reinterpret_cast<const Chunk<Y>*>(y)[chunk];
    const auto* a = reinterpret_cast<const X*>(&of_x);
    const auto* b = reinterpret_cast<const Y*>(&of_y);
    for (int i = 0; i < kChunk; ++i) {
      sum = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), sum);
    }
  }
  for (int c = chunks * kChunk + lane; c < columns; c += kRowLanes) {
    sum = fmaf(static_cast<float>(x[c]), static_cast<float>(y[c]), sum);
  }
  for (int other = kRowLanes / 2; other > 0; other /= 2) {
    sum += __shfl_xor_sync(~0U, sum, other);
  }
  return sum;
}

}  // namespace distr::cuda
