// SPDX-License-Identifier: Apache-2.0
// What far scores keep of dropped columns:
//   dropped_i = sum_{c dropped} q_ic kbar_c
// with the means kbar of the block of row i. A warp takes a row, a lane every 32nd of its dropped columns; the row of Q
// and the means, which the rows of a block share, come from the caches. The sum is in fp32, in the same order in every
// run.
#include "cuda/prepare/dropped_scores.h"

#include "cuda/dependent_launch.cuh"
#include "cuda/near.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda {
namespace {

constexpr int kWarps = 8;

struct DroppedScores {
  DeviceProblem problem;
  Strides q_strides;
  const void* q;
  const std::int32_t* order;
  const float* key_means;
  float* dropped;
  std::int64_t first_row, rows;  // of each head
};

template <class T>
__global__ void __launch_bounds__(kWarps * 32) dropped_scores_kernel(const __grid_constant__ DroppedScores p) {
  launch_dependent_grids();
  wait_on_dependent_grids();
  const DeviceProblem& problem = p.problem;
  const std::int64_t index = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const std::int64_t head = index / p.rows;  // of all batches
  const std::int64_t row = p.first_row + index % p.rows;
  if (head >= problem.batch * problem.heads_q) {
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t b = head / problem.heads_q;
  const std::int64_t h = head % problem.heads_q;
  const unsigned block = static_cast<unsigned>(row) / problem.rows_of_block;
  const std::int32_t* const order = p.order + (head * problem.blocks + block) * problem.head_dim;
  const float* const means = p.key_means + key_means_at(problem, b, h / (problem.heads_q / problem.heads_kv), block);
  const T* const q = static_cast<const T*>(p.q) + b * p.q_strides.batch + h * p.q_strides.head + row * p.q_strides.row;
  float sum = 0;
  for (int position = problem.groups + lane; position < problem.head_dim; position += 32) {
    const int c = order[position];
    sum = fmaf(static_cast<float>(q[c]), means[c], sum);
  }
  for (int other = 16; other > 0; other /= 2) {
    sum += __shfl_xor_sync(~0U, sum, other);
  }
  if (lane == 0) {
    p.dropped[head * problem.seq_q + row] = sum;
  }
}

}  // namespace

void dropped_scores(DType dtype, const DeviceProblem& problem, std::int64_t first_row, const Operand& q,
                    const std::int32_t* order, const float* key_means, float* dropped, void* stream) {
  const DroppedScores p{problem, q.strides, q.data, order, key_means, dropped, first_row, problem.seq_q - first_row};
  const std::int64_t count = problem.batch * problem.heads_q * p.rows;
  if (count > 0) {
    launch_dependent(dtype == DType::f16 ? dropped_scores_kernel<__half> : dropped_scores_kernel<__nv_bfloat16>,
                     dim3(static_cast<unsigned>(common::ceil_div(count, std::int64_t{kWarps}))), kWarps * 32, 0, stream,
                     p);
  }
}

}  // namespace distr::cuda
