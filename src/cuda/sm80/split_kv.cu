// SPDX-License-Identifier: Apache-2.0
// The pieces of a row are added up as the online softmax adds tiles, all at once: with reference = max_i reference_i
//   w_i = 2^(reference_i - reference)
//   O = sum_i w_i O_i / sum_i w_i rowsum_i      LSE = ln 2 (reference + log2 sum_i w_i rowsum_i)
// A thread owns four columns of a row, and reads its part of each piece in turn.
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
  const std::int64_t first = std::int64_t{tile} * split.pieces * rows + row_in_tile;  // rows apart: the pieces' rows
  const int column = static_cast<int>(threadIdx.x) % threads_per_row * kColumns;

  float reference = -INFINITY;
  for (unsigned piece = 0; piece < split.pieces; ++piece) {
    reference = fmaxf(reference, split.row[first + std::int64_t{piece} * rows].x);
  }
  float sum = 0;
  float4 o{};
  for (unsigned piece = 0; piece < split.pieces; ++piece) {
    const std::int64_t at = first + std::int64_t{piece} * rows;
    const float2 of_piece = split.row[at];
    const float factor = ptx::exp2(of_piece.x - reference);
    const float4 part = *reinterpret_cast<const float4*>(split.o + at * dim + column);
    sum = fmaf(factor, of_piece.y, sum);
    o = {fmaf(factor, part.x, o.x), fmaf(factor, part.y, o.y), fmaf(factor, part.z, o.z), fmaf(factor, part.w, o.w)};
  }

  if (p.lse != nullptr && column == 0) {
    p.lse[(work.batch * problem.heads_q + work.head) * problem.seq_q + row] = natural_lse(reference, sum);
  }
  const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
  T* const to = static_cast<T*>(p.o) + work.batch * problem.o.batch + work.head * problem.o.head + row * problem.o.row;
  const float values[kColumns] = {o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse};
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
