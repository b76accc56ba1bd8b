// SPDX-License-Identifier: Apache-2.0
// dK and dV of the blocks of keys that were split into pieces (SplitKeys):
//
//   dK = the sum over the pieces, in their order, of what each found; dV likewise
//
// The order is fixed, so that the bits are the same in every run. A thread block has dK or dV of a split block, a warp
// of it 16 keys, in fragments as the pieces stored them. Bound by memory, and next to nothing beside the backward.
#pragma once

#include "cuda/backward_scheduler.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_epilogue.cuh"

namespace distr::cuda::sm90 {

// A warp has 16 keys.
template <class C>
inline constexpr int kAddingThreads = 32 * C::kKeys / 16;

// A warp's 16 keys from `row` on of a split block. pieces: of the block, in fragments; count: how many.
template <class T, int kColumns>
__device__ inline void add_keys(const KeyPlace& place, int row, const float* pieces, unsigned count, float* parts,
                                void* to, const Strides& strides, int columns, float factor) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum[kColumns / 2] = {};
#pragma unroll 1
  for (unsigned piece = 0; piece < count; ++piece) {
    const float* const from = pieces + (std::int64_t{piece} * kKeyTileRows + warp * 16) * kColumns + lane * 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(from + n * kFragment);
      sum[4 * n] += x.x;
      sum[4 * n + 1] += x.y;
      sum[4 * n + 2] += x.z;
      sum[4 * n + 3] += x.w;
    }
  }
  store_keys<T>(place, row, sum, parts, to, strides, columns, factor);
}

// A thread block has a split block of keys: its dK, or its dV. Sinks are a query head's, whose parts take the sum;
// where others are split, query heads have K of their own.
template <class C>
__global__ void __launch_bounds__(kAddingThreads<C>) add_pieces(const __grid_constant__ BackwardParameters p) {
  using T = typename C::Element;
  launch_dependent_grids();
  wait_on_dependent_grids();
  const DeviceProblem& problem = p.problem;
  const SplitKeys& split = p.split;
  const int heads = static_cast<int>(problem.heads_q);
  const auto blocks = static_cast<unsigned>((problem.seq_k + C::kKeys - 1) / C::kKeys);
  const auto of_head = [&] {  // of all batches
    const auto head = static_cast<int>(blockIdx.x / split.sinks);
    return TileCoord{head / heads, head % heads, static_cast<int>(blockIdx.x % split.sinks)};
  };
  const TileCoord coord = split.sinks > 0
                              ? of_head()
                              : TileCoord::of(split.first + blockIdx.x, heads, problem.batch, blocks, p.interleaved);
  const std::int64_t part = (std::int64_t{coord.batch} * heads + coord.head) * p.key_rows;
  const KeyPlace place{coord.batch, coord.head, 0, static_cast<int>(problem.seq_k), part, false};
  const int row = coord.tile * C::kKeys + static_cast<int>(threadIdx.x) / 32 * 16;
  const std::int64_t first = std::int64_t{blockIdx.x} * split.pieces * C::kKeys;
  if (blockIdx.y == 0) {
    add_keys<T, C::kColumns>(place, row, split.d_k + first * C::kColumns, split.pieces, p.d_k_parts, p.d_k,
                             p.d_k_strides, problem.head_dim, p.scale);
  } else {
    add_keys<T, C::kValues>(place, row, split.d_v + first * C::kValues, split.pieces, p.d_v_parts, p.d_v, p.d_v_strides,
                            problem.head_dim_v, 1.0F);
  }
}

}  // namespace distr::cuda::sm90
