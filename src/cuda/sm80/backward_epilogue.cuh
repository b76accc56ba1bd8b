// SPDX-License-Identifier: Apache-2.0
// The epilogue of dQ, which starts from dQ~ in registers. Exact attention rounds and stores it. Where columns are
// grouped, dQ~ goes through shared memory: dq_hat of a group is the sum over its columns, and it is the gradient of the
// group's mean, which all columns share, or of its sampled column.
#pragma once

#include "cuda/sm80/backward_tile.cuh"

namespace distr::cuda::sm80 {

// Stores dQ~ in sums [kRows][kPitch], where this warp's rows begin at `row`.
template <class C>
__device__ inline void store_dq_tile(float* sums, int row, const float (&d_q)[C::kRowTiles][C::kDim / 8][4]) {
  const int lane = static_cast<int>(ptx::opaque(threadIdx.x)) % 32;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kDim / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const to = sums + (row + m * 16 + half * 8 + lane / 4) * C::kPitch + n * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(d_q[m][n][half * 2], d_q[m][n][half * 2 + 1]);
      }
    }
  }
}

// Writes dQ of the thread block's rows from dQ~ [kRows][kPitch] in shared memory. A warp takes one row at a time, and
// its lanes take the groups.
template <class C>
__device__ inline void store_groups(const BackwardParameters& p, const TileCoord& coord, int first, const float* sums) {
  using T = typename C::Element;
  const DeviceProblem& problem = p.problem;
  const int d = problem.head_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int end = static_cast<int>(min(std::int64_t{first} + C::kRows, problem.seq_q));
  const std::int64_t head = std::int64_t{coord.batch} * problem.heads_q + coord.head;
  T* const base = static_cast<T*>(p.d_q) + coord.batch * p.d_q_strides.batch + coord.head * p.d_q_strides.head;
#pragma unroll 2
  for (int row = first + static_cast<int>(threadIdx.x) / 32; row < end; row += C::kWarps) {
    const float* const of_row = sums + (row - first) * C::kPitch;
    T* const to = base + row * p.d_q_strides.row;
    const unsigned block = static_cast<unsigned>(row) / problem.rows_of_block;
    const bool exact = problem.first_block_is_exact && block == 0;
    const int members = exact ? 1 : problem.members;
    const std::int32_t* const order = p.order + (head * problem.blocks + block) * d;
    for (int g = lane; g * members < d; g += 32) {
      const int begin = g * members;
      const int size = min(members, d - begin);
      const bool kept = exact || g < problem.groups;  // `energy` has dropped the other columns
      float sum = 0;
      for (int member = 0; member < size; ++member) {
        sum += of_row[exact ? begin : order[begin + member]];
      }
      const float whole = kept ? p.scale * sum : 0.0F;
      for (int member = 0; member < size; ++member) {
        const float share = problem.mean ? whole / static_cast<float>(size) : member == 0 ? whole : 0.0F;
        to[exact ? begin : order[begin + member]] = T(share);
      }
    }
  }
}

// Writes dQ of the thread block at `coord`, in which this warp's rows begin at `row`. This warp no longer reads
// anything else in `storage`, which exact attention does not use.
template <class C>
__device__ inline void store_dq(const BackwardParameters& p, const TileCoord& coord, int row,
                                typename C::Storage& storage, const float (&d_q)[C::kRowTiles][C::kDim / 8][4]) {
  using T = typename C::Element;
  const int first = coord.tile * C::kRows;
  if (p.problem.exact) {
    T* const rows = static_cast<T*>(p.d_q) + coord.batch * p.d_q_strides.batch + coord.head * p.d_q_strides.head;
    store_rows(rows, p.d_q_strides.row, first + row, p.problem.seq_q, 0, p.problem.head_dim, p.scale, d_q);
    return;
  }
  __syncthreads();  // no warp reads the tiles in it any more
  store_dq_tile<C>(storage.d_q[0], row, d_q);
  __syncthreads();
  store_groups<C>(p, coord, first, storage.d_q[0]);
}

}  // namespace distr::cuda::sm80
