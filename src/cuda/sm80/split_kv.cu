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

// The kernel that left the partial results, as far as place_of() and lse_index() ask.
template <RowsOf kRowsOf>
struct SplitKernel {
  static constexpr bool kSequences = kRowsOf == RowsOf::kv_head;
};

// Where a row of batch entry b goes.
template <class T>
struct Target {
  T* o;  // of query 0 and head 0
  float* lse;
  std::int64_t row_end;
};

template <class C, class T>
__device__ Target<T> target_of(const ForwardParameters& p, std::int64_t b) {
  const DeviceProblem& problem = p.problem;
  T* const o = static_cast<T*>(p.o);
  if constexpr (C::kSequences) {
    const DeviceSequence sequence(problem, p.lengths, b);
    return {o + entry_offset(p.lengths, problem.o, b, sequence.first_row),
            p.lse == nullptr ? nullptr : p.lse + lse_offset(p.lengths, problem, b, sequence.first_row),
            sequence.rows * static_cast<std::int64_t>(p.heads_of_row.value())};
  } else {
    return {o + b * problem.o.batch, p.lse, p.row_end};
  }
}

template <class T, class C>
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
  const Target<T> target = target_of<C, T>(p, work.batch);
  if (row >= target.row_end) {
    return;
  }
  const RowPlace at = place_of<C>(p, work.head, row);
  const std::int64_t first = std::int64_t{tile} * split.num_splits * rows + row_in_tile;  // those of splits: rows apart
  const int column = static_cast<int>(threadIdx.x) % threads_per_row * kColumns;

  float row_max = -INFINITY;
#pragma unroll 8
  for (unsigned n = 0; n < split.num_splits; ++n) {
    row_max = fmaxf(row_max, split.row_stats[first + std::int64_t{n} * rows].x);
  }
  const auto share = [&](std::int64_t of_split) {
    const float2 stats = split.row_stats[of_split];
    return ptx::exp2(stats.x - row_max) * stats.y;
  };
  float row_sum = 0;
#pragma unroll 4
  for (unsigned n = 0; n < split.num_splits; ++n) {
    row_sum += share(first + std::int64_t{n} * rows);
  }
  const float inverse = row_sum == 0.0F ? 0.0F : 1.0F / row_sum;
  float4 o{};
#pragma unroll 8
  for (unsigned n = 0; n < split.num_splits; ++n) {
    const std::int64_t of_split = first + std::int64_t{n} * rows;
    const float scale = share(of_split) * inverse;
    const float4 partial = *reinterpret_cast<const float4*>(split.o + of_split * dim + column);
    o = {fmaf(scale, partial.x, o.x), fmaf(scale, partial.y, o.y), fmaf(scale, partial.z, o.z),
         fmaf(scale, partial.w, o.w)};
  }

  if (target.lse != nullptr && column == 0) {
    target.lse[lse_index<C>(p, work.batch, at)] = natural_lse(row_max, row_sum);
  }
  T* const to = target.o + at.head * problem.o.head + at.query * problem.o.row;
  const float values[kColumns] = {o.x, o.y, o.z, o.w};
  for (int i = 0; i < kColumns && column + i < problem.head_dim_v; ++i) {
    to[column + i] = T(values[i]);
  }
}

template <class C>
void combine(const ForwardParameters& p, DType dtype, int rows, int dim, void* stream) {
  const std::int64_t threads = std::int64_t{p.split.end - p.split.begin} * rows * (dim / 4);
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  const auto kernel = dtype == DType::f16 ? combine_kernel<__half, C> : combine_kernel<__nv_bfloat16, C>;
  launch_dependent(kernel, blocks, kThreads, 0, stream, p, rows, dim);
}

}  // namespace

void combine_splits(const ForwardParameters& p, DType dtype, int rows, int dim, bool sequences, void* stream) {
  (sequences ? combine<SplitKernel<RowsOf::kv_head>> : combine<SplitKernel<RowsOf::head>>)(p, dtype, rows, dim, stream);
}

}  // namespace distr::cuda::sm80
