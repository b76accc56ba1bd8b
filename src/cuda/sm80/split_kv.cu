// SPDX-License-Identifier: Apache-2.0
// The partial results of a row are combined as the online softmax combines tiles, all at once: with m = max_i m_i,
// where m_i is the row max of split i and l_i its row sum,
//   w_i = 2^(m_i - m)
//   l = sum_i w_i l_i      O = sum_i (w_i l_i / l) O_i      LSE = ln 2 (m + log2 l)
// A thread owns four columns of a row, and reads them of one split after another.
#include "cuda/sm80/split_kv.h"

#include "cuda/dependent_launch.cuh"
#include "cuda/sm80/config.h"
#include "cuda/sm80/softmax.cuh"
#include "cuda/tile.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm80 {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ ForwardParameters p, int rows, int dim) {
  launch_dependent_grids();
  wait_on_dependent_grids();
  constexpr int kColumns = 4;
  const int threads_per_row = dim / kColumns;
  const std::int64_t index = std::int64_t{blockIdx.x} * (kThreads / threads_per_row) + threadIdx.x / threads_per_row;
  const auto tile = static_cast<unsigned>(index / rows);  // of the split ones
  const int row_in_tile = static_cast<int>(index % rows);
  const DeviceProblem& problem = p.problem;
  const SplitKv& split = p.split;
  if (tile >= split.end - split.begin) {
    return;
  }
  const WorkTile work = p.scheduler.at(split.begin + tile);
  const std::int64_t row = std::int64_t{work.row} + row_in_tile;
  if (row >= p.row_end) {
    return;
  }
  const std::int64_t first = std::int64_t{tile} * split.num_splits * rows + row_in_tile;  // those of splits: rows apart
  const int column = static_cast<int>(threadIdx.x) % threads_per_row * kColumns;

  float row_max = -INFINITY;
  for (unsigned n = 0; n < split.num_splits; ++n) {
    row_max = fmaxf(row_max, split.row_stats[first + std::int64_t{n} * rows].x);
  }
  const auto share = [&](std::int64_t at) {
    const float2 stats = split.row_stats[at];
    return ptx::exp2(stats.x - row_max) * stats.y;
  };
  float row_sum = 0;
#pragma unroll 4
  for (unsigned n = 0; n < split.num_splits; ++n) {
    row_sum += share(first + std::int64_t{n} * rows);
  }
  const float inverse = row_sum == 0.0F ? 0.0F : 1.0F / row_sum;
  float4 o{};
  for (unsigned n = 0; n < split.num_splits; ++n) {
    const std::int64_t at = first + std::int64_t{n} * rows;
    const float scale = share(at) * inverse;
    const float4 partial = *reinterpret_cast<const float4*>(split.o + at * dim + column);
    o = {fmaf(scale, partial.x, o.x), fmaf(scale, partial.y, o.y), fmaf(scale, partial.z, o.z),
         fmaf(scale, partial.w, o.w)};
  }

  if (p.lse != nullptr && column == 0) {
    p.lse[(work.batch * problem.heads_q + work.head) * problem.seq_q + row] = natural_lse(row_max, row_sum);
  }
  T* const to = static_cast<T*>(p.o) + work.batch * problem.o.batch + work.head * problem.o.head + row * problem.o.row;
  const float values[kColumns] = {o.x, o.y, o.z, o.w};
  for (int i = 0; i < kColumns && column + i < problem.head_dim_v; ++i) {
    to[column + i] = T(values[i]);
  }
}

}  // namespace

void combine_splits(const ForwardParameters& p, DType dtype, int rows, int dim, void* stream) {
  const std::int64_t threads = std::int64_t{p.split.end - p.split.begin} * rows * (dim / 4);
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  const auto kernel = dtype == DType::f16 ? combine_kernel<__half> : combine_kernel<__nv_bfloat16>;
  launch_dependent(kernel, blocks, kThreads, 0, stream, p, rows, dim);
}

}  // namespace distr::cuda::sm80
