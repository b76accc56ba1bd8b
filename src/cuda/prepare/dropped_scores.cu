// SPDX-License-Identifier: Apache-2.0
// What far scores keep of dropped columns:
//   dropped_i = sum_{c dropped} q_ic kbar_c
// with the means kbar of the block of row i. A warp takes kRows rows of a block, a lane every 32nd of their dropped
// columns; it reads the order and the means once. The sums are in fp32, in the same order in every run.
#include "cuda/prepare/dropped_scores.h"

#include "cuda/dependent_launch.cuh"
#include "cuda/near.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 16;          // of a warp; blocks of queries are multiples of it, or all rows
constexpr int kColumnsOfLane = 4;  // of 128

struct Arguments {
  DeviceProblem problem;
  Strides q_strides;
  const void* q;
  const std::int32_t* order;
  const float* key_means;
  float* dropped;
  std::int64_t first_row, rows;  // of each head
};

template <class T>
__global__ void __launch_bounds__(kWarps * 32) dropped_scores_kernel(const __grid_constant__ Arguments p) {
  launch_dependent_grids();
  wait_on_dependent_grids();
  const DeviceProblem& problem = p.problem;
  const std::int64_t index = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const std::int64_t runs = (p.rows + kRows - 1) / kRows;  // of a head
  const std::int64_t head = index / runs;                  // of all batches
  const std::int64_t first = p.first_row + index % runs * kRows;
  if (head >= problem.batch * problem.heads_q) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t b = head / problem.heads_q;
  const std::int64_t h = head % problem.heads_q;
  const unsigned block = static_cast<unsigned>(first) / problem.rows_of_block;
  const std::int32_t* const order = p.order + (head * problem.blocks + block) * problem.head_dim;
  const float* const means = p.key_means + key_means_at(problem, b, h / (problem.heads_q / problem.heads_kv), block);
  int columns[kColumnsOfLane];
  float mean[kColumnsOfLane];
#pragma unroll
  for (int i = 0; i < kColumnsOfLane; ++i) {
    const int position = problem.groups + i * 32 + lane;
    const bool is_dropped = position < problem.head_dim;
    columns[i] = is_dropped ? order[position] : -1;
    mean[i] = is_dropped ? means[columns[i]] : 0.0F;
  }
  const T* const q = static_cast<const T*>(p.q) + b * p.q_strides.batch + h * p.q_strides.head;
  float sums[kRows] = {};
#pragma unroll
  for (int i = 0; i < kColumnsOfLane; ++i) {
    if (columns[i] >= 0) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {  // behind the last row the last one, again
        const std::int64_t row = min(first + j, problem.seq_q - 1);
        sums[j] = fmaf(static_cast<float>(q[row * p.q_strides.row + columns[i]]), mean[i], sums[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    for (int other = 16; other > 0; other /= 2) {
      sums[j] += __shfl_xor_sync(~0U, sums[j], other);
    }
    if (lane == j && first + j < problem.seq_q) {
      p.dropped[head * problem.seq_q + first + j] = sums[j];
    }
  }
}

}  // namespace

void dropped_scores(DType dtype, const DeviceProblem& problem, std::int64_t first_row, const Operand& q,
                    const std::int32_t* order, const float* key_means, float* dropped, void* stream) {
  const Arguments p{problem, q.strides, q.data, order, key_means, dropped, first_row, problem.seq_q - first_row};
  const std::int64_t count = problem.batch * problem.heads_q * common::ceil_div(p.rows, std::int64_t{kRows});
  if (count > 0) {
    launch_dependent(dtype == DType::f16 ? dropped_scores_kernel<__half> : dropped_scores_kernel<__nv_bfloat16>,
                     dim3(static_cast<unsigned>(common::ceil_div(count, std::int64_t{kWarps}))), kWarps * 32, 0, stream,
                     p);
  }
}

}  // namespace distr::cuda
