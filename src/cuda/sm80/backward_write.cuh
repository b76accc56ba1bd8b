// SPDX-License-Identifier: Apache-2.0
// dQ from dQ~ in registers: rounded, or, where columns are grouped, by way of shared memory, where dq_hat of a group is
// the sum of its columns: the gradient of the mean or of the sampled column.
#pragma once

#include "cuda/sm80/backward_tile.cuh"

namespace distr::cuda::sm80 {

// sums [kRows][kPitch] = dQ~, of which this warp's rows begin at `row`.
template <class C>
__device__ inline void keep_sums(float* sums, int row, const float (&d_q)[C::kRowTiles][C::kDim / 8][4]) {
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

// dQ of the block's rows from dQ~ [kRows][kPitch] in shared memory: a warp takes a row, and its lanes take groups.
template <class C>
__device__ inline void store_groups(const BackwardParameters& p, const Place& place, int first, const float* sums) {
  using T = typename C::Element;
  const DeviceProblem& problem = p.problem;
  const int d = problem.head_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int end = static_cast<int>(min(std::int64_t{first} + C::kRows, problem.seq_q));
  const std::int64_t head = std::int64_t{place.batch} * problem.heads_q + place.head;
  T* const base = static_cast<T*>(p.d_q) + place.batch * p.d_q_strides.batch + place.head * p.d_q_strides.head;
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
      const bool kept = exact || g < problem.groups;  // the others were dropped by `energy`
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

// dQ of the thread block at `place`, of whose rows this warp's begin at `row`. shared: of the whole block, and no
// longer read by this warp; not used by exact attention.
template <class C>
__device__ inline void write_queries(const BackwardParameters& p, const Place& place, int row, void* shared,
                                     const float (&d_q)[C::kRowTiles][C::kDim / 8][4]) {
  using T = typename C::Element;
  const int first = place.tile * C::kRows;
  if (p.problem.exact) {
    T* const rows = static_cast<T*>(p.d_q) + place.batch * p.d_q_strides.batch + place.head * p.d_q_strides.head;
    store_rows(rows, p.d_q_strides.row, first + row, p.problem.seq_q, 0, p.problem.head_dim, p.scale, d_q);
    return;
  }
  __syncthreads();  // nobody reads it any more
  auto* const sums = static_cast<float*>(shared);
  keep_sums<C>(sums, row, d_q);
  __syncthreads();
  store_groups<C>(p, place, first, sums);
}

}  // namespace distr::cuda::sm80
