// SPDX-License-Identifier: Apache-2.0
// x_hat[row, g * copies + i] = the sum, the mean or the first of x[row, c] over the columns c of group g, in fp32.
//
// A block takes 64 rows of a query head: they are staged in shared memory, [64][columns], 16 bytes a thread, and the
// order beside them; then a thread makes two neighbouring columns of a row. Bound by memory: x is read once for each
// query head, x_hat written once.
#include "cuda/sm90/estimate.h"

#include "common/element.h"
#include "cuda/launch.h"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64;
constexpr int kMostColumns = 128;

struct Arguments {
  Strides strides;
  Extent extent;  // of x
  const std::int32_t* order;
  Estimation estimation;
  std::int64_t blocks, row_tiles;  // of a head
  int packed;                      // columns of x_hat
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    estimate_kernel(const T* x, const __grid_constant__ Arguments a, std::uint32_t* estimated) {
  alignas(16) __shared__ T s_x[kRows][kMostColumns];
  __shared__ std::int32_t s_order[kMostColumns];
  const Extent& extent = a.extent;
  const auto columns = static_cast<int>(extent.columns);
  const std::int64_t head = blockIdx.x / a.row_tiles;  // of batch * heads_q
  const std::int64_t first = a.estimation.first_row + blockIdx.x % a.row_tiles * kRows;
  const auto rows = static_cast<int>(min(extent.rows - first, std::int64_t{kRows}));
  const std::int64_t group_heads = a.estimation.heads_q / extent.heads;
  const T* from = x + head / a.estimation.heads_q * a.strides.batch +
                  head % a.estimation.heads_q / group_heads * a.strides.head + first * a.strides.row;
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += kThreads) {
    s_order[c] = a.order[(head * a.blocks + first / a.estimation.block) * columns + c];
  }
  constexpr int kChunks = kMostColumns / kChunk;
  for (int i = static_cast<int>(threadIdx.x); i < rows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int column = i % kChunks * kChunk;
    if (column < columns) {  // rows are padded to whole chunks
      *reinterpret_cast<uint4*>(&s_x[row][column]) =
          *reinterpret_cast<const uint4*>(from + row * a.strides.row + column);
    }
  }
  __syncthreads();

  const int members = a.estimation.members;
  const auto value = [&](int row, int column) {
    const int group = column / a.estimation.copies;
    const int begin = group * members;
    const int size = column < a.estimation.columns ? min(members, columns - begin) : 0;
    const int taken = a.estimation.kind == Estimate::first ? min(size, 1) : size;
    float sum = 0;
    for (int member = 0; member < taken; ++member) {
      sum += static_cast<float>(s_x[row][s_order[begin + member]]);
    }
    return (a.estimation.kind == Estimate::mean && size > 1 ? sum / static_cast<float>(size) : sum) *
           a.estimation.scale;
  };
  const int pairs = a.packed / 2;
  std::uint32_t* to = estimated + (head * extent.rows + first) * pairs;
  for (int i = static_cast<int>(threadIdx.x); i < rows * pairs; i += kThreads) {
    const int row = i / pairs;
    const int column = i % pairs * 2;
    to[i] = ptx::pack(value(row, column), value(row, column + 1), T{});
  }
}

}  // namespace

void estimate(const void* x, const Strides& strides, const Extent& extent, const std::int32_t* order,
              const Estimation& estimation, void* estimated, void* stream) {
  const std::int64_t row_tiles = common::ceil_div(extent.rows - estimation.first_row, std::int64_t{kRows});
  const Arguments arguments{strides,
                            extent,
                            order,
                            estimation,
                            common::ceil_div(extent.rows, estimation.block),
                            row_tiles,
                            static_cast<int>(packed_columns(estimation.columns))};
  const std::int64_t blocks = extent.batch * estimation.heads_q * row_tiles;
  const auto run = [&](auto kernel, auto* typed) {
    launch(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, typed, arguments,
           static_cast<std::uint32_t*>(estimated));
  };
  if (estimation.dtype == DType::f16) {
    run(estimate_kernel<__half>, static_cast<const __half*>(x));
  } else {
    run(estimate_kernel<__nv_bfloat16>, static_cast<const __nv_bfloat16*>(x));
  }
}

Operand estimated(Operand x, const std::int32_t* order, const Estimation& estimation, void* to, void* stream) {
  estimate(x.data, x.strides, x.extent, order, estimation, to, stream);
  x.data = to;
  x.extent.heads = estimation.heads_q;
  x.extent.columns = estimation.columns;
  x.strides = packed_strides(x.extent);
  return x;
}

}  // namespace distr::cuda::sm90
