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

// Where a lane finds dQ of its columns lane, lane + 32, ... in a row of dQ~: in the column itself where groups have one
// column, else in the group's sum, which sum_groups() leaves there. kNone: dQ is 0.
template <class C>
struct ColumnSources {
  static constexpr int kNone = -1;
  int of[C::kDim / 32];
};

// `order`: of the rows' block; null: the block is exact. `places`: the warp's, of every column in the order.
template <class C>
__device__ inline void find_sources(ColumnSources<C>& sources, const DeviceProblem& problem, const std::int32_t* order,
                                    std::uint8_t (&places)[C::kDim]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (order != nullptr) {
    __syncwarp();  // no lane reads the last block's any more
    for (int n = lane; n < problem.head_dim; n += 32) {
      places[order[n]] = static_cast<std::uint8_t>(n);
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) {
    const int column = lane + 32 * i;
    sources.of[i] = column;
    if (order != nullptr && column < problem.head_dim) {
      const int group = places[column] / problem.members;
      const bool shares = problem.mean || places[column] % problem.members == 0;  // else the sampled column has all
      sources.of[i] = group >= problem.groups || !shares ? ColumnSources<C>::kNone
                      : problem.members == 1             ? column
                                                         : group;
    }
  }
}

// Puts dQ of each group, dq_hat times the scale by as many columns as share it, in the place of the first columns of a
// row of dQ~.
template <class C>
__device__ inline void sum_groups(const DeviceProblem& problem, float scale, const std::int32_t* order, float* row) {
  constexpr int kGroups = C::kDim / 2;  // the most, of two columns or more
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sums[(kGroups + 31) / 32];
#pragma unroll
  for (int i = 0; i < (kGroups + 31) / 32; ++i) {
    const int begin = (lane + 32 * i) * problem.members;
    const int size = min(problem.members, problem.head_dim - begin);
    sums[i] = 0;
    for (int member = 0; member < size; ++member) {
      sums[i] += row[order[begin + member]];
    }
    sums[i] *= scale;
    sums[i] = problem.mean && size > 0 ? sums[i] / static_cast<float>(size) : sums[i];
  }
  __syncwarp();  // all lanes have read the row
#pragma unroll
  for (int i = 0; i < (kGroups + 31) / 32; ++i) {
    if (lane + 32 * i < problem.groups) {
      row[lane + 32 * i] = sums[i];
    }
  }
  __syncwarp();
}

// Writes dQ of the warp's rows, from `first` on, from their dQ~ in `sums` [rows][kPitch].
template <class C>
__device__ inline void store_groups(const BackwardParameters& p, const TileCoord& coord, int first, float* sums,
                                    std::uint8_t (&places)[C::kDim]) {
  using T = typename C::Element;
  const DeviceProblem& problem = p.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = static_cast<int>(min(std::int64_t{first} + C::kRows / C::kWarps, problem.seq_q)) - first;
  const std::int64_t head = std::int64_t{coord.batch} * problem.heads_q + coord.head;
  T* const base = static_cast<T*>(p.d_q) + coord.batch * p.d_q_strides.batch + coord.head * p.d_q_strides.head +
                  first * p.d_q_strides.row;
  ColumnSources<C> sources;
  for (int begin = 0, end = 0; begin < rows; begin = end) {  // rows of one block
    const unsigned block = static_cast<unsigned>(first + begin) / problem.rows_of_block;
    end = static_cast<int>(min(std::int64_t{rows}, (block + std::int64_t{1}) * problem.rows_of_block.value() - first));
    const bool is_exact = problem.first_block_is_exact && block == 0;
    const std::int32_t* const order = is_exact ? nullptr : p.order + (head * problem.blocks + block) * problem.head_dim;
    find_sources<C>(sources, problem, order, places);
    const bool sums_first = !is_exact && problem.members > 1;
    const float factor = sums_first ? 1 : p.scale;
#pragma unroll 1
    for (int row = begin; row < end; ++row) {
      float* const of_row = sums + row * C::kPitch;
      if (sums_first) {
        sum_groups<C>(problem, p.scale, order, of_row);
      }
#pragma unroll
      for (int i = 0; i < C::kDim / 32; ++i) {
        if (lane + 32 * i < problem.head_dim) {
          const int source = sources.of[i];
          base[row * p.d_q_strides.row + lane + 32 * i] =
              T(source == ColumnSources<C>::kNone ? 0.0F : factor * of_row[source]);
        }
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
  constexpr int kRowsOfWarp = C::kRows / C::kWarps;
  const int first = coord.tile * C::kRows;
  if (p.problem.exact) {
    T* const rows = static_cast<T*>(p.d_q) + coord.batch * p.d_q_strides.batch + coord.head * p.d_q_strides.head;
    store_rows(rows, p.d_q_strides.row, first + row, p.problem.seq_q, 0, p.problem.head_dim, p.scale, d_q);
    return;
  }
  __syncthreads();  // no warp reads the tiles in it any more
  store_dq_tile<C>(storage.epilogue.d_q[0], row, d_q);
  __syncwarp();
  store_groups<C>(p, coord, first + row, storage.epilogue.d_q[row], storage.epilogue.places[row / kRowsOfWarp]);
}

}  // namespace distr::cuda::sm80
