// SPDX-License-Identifier: Apache-2.0
// dK and dV of the blocks of keys that were split into pieces (SplitKeys):
//
//   dK = the sum over the pieces, in their order, of what each found; dV likewise
//
// The order is fixed, so that the bits are the same in every run. A thread block has 32 columns of dK or dV of a split
// block, a warp of it 16 keys, in fragments as the pieces stored them. Bound by memory, and next to nothing beside the
// backward.
#pragma once

#include "cuda/backward_scheduler.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_epilogue.cuh"

namespace distr::cuda::sm90 {

inline constexpr int kAddedColumns = 32;
inline constexpr int kAddingThreads = 32 * kKeyTileRows / 16;  // a warp has 16 keys

// Sums over pieces, and where they go: to the parts of a query head, or to a tensor of so many columns.
struct AddedSums {
  const float* pieces;  // of the split block, in fragments of kKeyTileRows rows and so many padded columns
  int padded_columns;
  float* parts;  // or null
  void* to;
  Strides strides;
  int columns;
  float factor;
};

// kAddedColumns of a warp's 16 keys from `row` on, of so many pieces; first: of the columns.
template <class T>
__device__ inline void add_keys(const KeyPlace& place, int row, const AddedSums& sums, unsigned pieces, int first) {
  if (sums.parts == nullptr && first >= sums.columns) {
    return;  // padding
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum[kAddedColumns / 2] = {};
#pragma unroll 1
  for (unsigned piece = 0; piece < pieces; ++piece) {
    const std::int64_t of_piece = (std::int64_t{piece} * kKeyTileRows + warp * 16) * sums.padded_columns;
    const float* const from = sums.pieces + of_piece + first / 8 * kFragment + lane * 4;
#pragma unroll
    for (int n = 0; n < kAddedColumns / 8; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(from + n * kFragment);
      sum[4 * n] += x.x;
      sum[4 * n + 1] += x.y;
      sum[4 * n + 2] += x.z;
      sum[4 * n + 3] += x.w;
    }
  }
  if (sums.parts != nullptr) {
    store_fragments(sums.parts + (place.part + row) * sums.padded_columns + first / 8 * kFragment, sum);
  } else {
    store_rows(place, row, sum, static_cast<T*>(sums.to) + first, sums.strides,
               min(sums.columns - first, kAddedColumns), sums.factor);
  }
}

// Sinks are a query head's, whose parts take the sum; where others are split, query heads have K of their own. columns,
// values: the padded ones of the backward's shape.
template <class T>
__global__ void __launch_bounds__(kAddingThreads)
    add_pieces(const __grid_constant__ BackwardParameters p, int columns, int values) {
  launch_dependent_grids();
  wait_on_dependent_grids();
  const DeviceProblem& problem = p.problem;
  const SplitKeys& split = p.split;
  const int heads = static_cast<int>(problem.heads_q);
  const auto blocks = static_cast<unsigned>((problem.seq_k + kKeyTileRows - 1) / kKeyTileRows);
  const auto of_head = [&] {  // of all batches
    const auto head = static_cast<int>(blockIdx.x / split.sinks);
    return TileCoord{head / heads, head % heads, static_cast<int>(blockIdx.x % split.sinks)};
  };
  const TileCoord coord = split.sinks > 0
                              ? of_head()
                              : TileCoord::of(split.first + blockIdx.x, heads, problem.batch, blocks, p.interleaved);
  const std::int64_t part = (std::int64_t{coord.batch} * heads + coord.head) * p.key_rows;
  const KeyPlace place{coord.batch, coord.head, 0, static_cast<int>(problem.seq_k), part, false};
  const int row = coord.tile * kKeyTileRows + static_cast<int>(threadIdx.x) / 32 * 16;
  const std::int64_t first_row = std::int64_t{blockIdx.x} * split.pieces * kKeyTileRows;
  const int first = static_cast<int>(blockIdx.y) * kAddedColumns;
  if (first < columns) {
    add_keys<T>(place, row,
                {split.d_k + first_row * columns, columns, p.d_k_parts, p.d_k, p.d_k_strides,
                 static_cast<int>(problem.head_dim), p.scale},
                split.pieces, first);
  } else {
    add_keys<T>(place, row,
                {split.d_v + first_row * values, values, p.d_v_parts, p.d_v, p.d_v_strides,
                 static_cast<int>(problem.head_dim_v), 1.0F},
                split.pieces, first - columns);
  }
}

}  // namespace distr::cuda::sm90
