// SPDX-License-Identifier: Apache-2.0
// The rank of a column: how many columns come before it. Comparing and counting in floats takes fewer instructions than
// in integers.
#pragma once

#include <cstdint>

#include "cuda/grouping_loads.cuh"

namespace distr::cuda::grouping {

// The largest float below x, which is not negative.
[[nodiscard]] __device__ inline float below(float x) {
  return __uint_as_float(x > 0 ? __float_as_uint(x) - 1 : 0x80000001U);
}

// The rank of a column by energy: columns of more energy come before it, and columns of the same energy to its left.
// Lanes l and l + 16 of warp w count for column 16 w + l, each over every second four columns. `energies` has half as
// many elements as the block has threads; it is less than 0 where there is no column.
[[nodiscard]] __device__ inline int rank_by_energy(float energy, const float* energies) {
  const float energy_below = below(energy);
  const unsigned in_warp = threadIdx.x % 32;
  const unsigned tile = threadIdx.x / 32;
  const auto* others = reinterpret_cast<const float4*>(energies) + in_warp / 16;
  float4 sum{};
#pragma unroll 1
  for (unsigned first = 0; first < blockDim.x / 32; first += 2) {
#pragma unroll
    for (unsigned j = 0; j < 4; ++j) {
      const float bound = first + j / 2 < tile ? energy_below : energy;
      const float4 other = others[2 * j];
      sum.x += other.x > bound ? 1.0F : 0.0F;
      sum.y += other.y > bound ? 1.0F : 0.0F;
      sum.z += other.z > bound ? 1.0F : 0.0F;
      sum.w += other.w > bound ? 1.0F : 0.0F;
    }
    others += 8;
  }
  float rank = sum.x + sum.y + (sum.z + sum.w);
  rank += __shfl_xor_sync(~0U, rank, 16);
  const unsigned equal = __match_any_sync(~0U, __float_as_uint(energy));  // both halves have all of the warp's columns
  return static_cast<int>(rank) + __popc(equal & ((1U << in_warp % 16) - 1));
}

// Writes the order of the columns by ascending keys, no two of which are the same. Two lanes count the columns with
// smaller keys than one column, each over every second four columns. `keys` has `tiles` tiles and is infinite where
// there is no column.
__device__ inline void write_order_by_key(const float* keys, int tiles, int head_dim, std::int32_t* order) {
  constexpr int kHalf = 16;
  const int in_warp = static_cast<int>(threadIdx.x % 32);
  for (int first = static_cast<int>(threadIdx.x) / 32 * kHalf; first < head_dim;
       first += static_cast<int>(blockDim.x) / 32 * kHalf) {
    const int column = first + in_warp % kHalf;
    const float key = keys[column];
    const auto* others = reinterpret_cast<const float4*>(keys) + in_warp / kHalf;
    float4 smaller{};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int j = 0; j < kTileColumns / 8; ++j) {
        const float4 other = others[2 * j];
        smaller.x += other.x < key ? 1.0F : 0.0F;
        smaller.y += other.y < key ? 1.0F : 0.0F;
        smaller.z += other.z < key ? 1.0F : 0.0F;
        smaller.w += other.w < key ? 1.0F : 0.0F;
      }
      others += kTileColumns / 4;
    }
    float rank = smaller.x + smaller.y + (smaller.z + smaller.w);
    rank += __shfl_xor_sync(~0U, rank, kHalf);
    if (in_warp < kHalf && column < head_dim) {
      order[static_cast<int>(rank)] = column;
    }
  }
}

}  // namespace distr::cuda::grouping
