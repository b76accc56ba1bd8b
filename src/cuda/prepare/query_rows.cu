// SPDX-License-Identifier: Apache-2.0
// What the backward needs of every row of Q (method, 3), in one kernel:
//   D = rowsum(dO * O) - dLSE      in fp32
//   -LSE to the base 2             in the layout that the kernels want
//   Q~, q_hat spread over d        in column c what q_hat has for the group of c, rounded as in the forward; 0 where c
//                                  was dropped
// Eight lanes take a row. A row of Q and its Q~ are in shared memory, for the order scatters their columns.
#include "cuda/prepare/query_rows.h"

#include <cfloat>
#include <cmath>

#include "common/element.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/prepare/operand.h"
#include "cuda/prepare/stats_columns.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda {
namespace {

constexpr int kLanes = 8;  // of a row
constexpr int kRows = kPreprocessedRows;
constexpr int kThreads = kRows * kLanes;
constexpr int kMaxDim = 256;
// To the base 2: from here on the rounding of LSE and of the scores decides P, which may leave its range. Such a row
// takes no part: its P is 0, for a bound of 1 would cost the kernels' loops an instruction.
constexpr float kMaxLse = 0x1p22F;

// The sum of x[c] * y[c] over the row, in all of its lanes. aligned: both begin at a multiple of 16 bytes.
template <class T>
[[nodiscard]] __device__ float dot(const T* x, const T* y, int columns, bool aligned) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int chunks = aligned ? columns / kChunk : 0;
  float sum = 0;
  for (int chunk = lane; chunk < chunks; chunk += kLanes) {
    const uint4 of_x = reinterpret_cast<const uint4*>(x)[chunk];
    const uint4 of_y = reinterpret_cast<const uint4*>(y)[chunk];
    const auto* a = reinterpret_cast<const T*>(&of_x);
    const auto* b = reinterpret_cast<const T*>(&of_y);
    for (int i = 0; i < kChunk; ++i) {
      sum = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), sum);
    }
  }
  for (int c = chunks * kChunk + lane; c < columns; c += kLanes) {
    sum = fmaf(static_cast<float>(x[c]), static_cast<float>(y[c]), sum);
  }
  for (int other = kLanes / 2; other > 0; other /= 2) {
    sum += __shfl_xor_sync(~0U, sum, other);
  }
  return sum;
}

// Of the index-th row of all heads.
__device__ inline void store_stats(const QueryRows& rows, std::int64_t index, float shift, float d) {
  if (rows.layout == StatsLayout::pairs) {
    static_cast<float2*>(rows.stats)[index] = make_float2(shift, d);
  } else {
    StatsColumns& tile = static_cast<StatsColumns*>(rows.stats)[index / kStatsTile];
    const float of_scores = shift == -INFINITY ? kHidingShift : shift / rows.problem.scale_log2;
    tile.shift[index % kStatsTile] = rows.problem.softcap == 0 ? met_columns(of_scores) : idle_columns(of_scores);
    tile.minus_d[index % kStatsTile] = met_columns(-d);
  }
}

// to = Q~ of the row `from`; both are in shared memory.
template <class T>
__device__ void spread_row(const DeviceProblem& problem, const std::int32_t* order, const T* from, T* to) {
  const int d = problem.head_dim;
  for (int g = static_cast<int>(threadIdx.x) % kLanes; g * problem.members < d; g += kLanes) {
    const int begin = g * problem.members;
    const int size = min(problem.members, d - begin);
    const int sampled = g >= problem.groups ? 0 : problem.mean ? size : 1;
    float sum = 0;
    for (int member = 0; member < sampled; ++member) {
      sum += static_cast<float>(from[order[begin + member]]);
    }
    const T estimate = T(sum * (1.0F / static_cast<float>(max(sampled, 1))));
    for (int member = 0; member < size; ++member) {
      to[order[begin + member]] = estimate;
    }
  }
}

struct Alignment {
  bool q, o;  // rows of Q; of O and dO
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    preprocess_kernel(const __grid_constant__ QueryRows rows, Alignment aligned) {
  __shared__ __align__(16) T s_rows[kRows][2][kMaxDim];
  launch_dependent_grids();
  wait_on_dependent_grids();
  const DeviceProblem& problem = rows.problem;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int own = static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t index = std::int64_t{blockIdx.x} * kRows + own;
  const std::int64_t head = index / rows.stats_rows;  // of all batches
  const std::int64_t row = index % rows.stats_rows;
  const std::int64_t b = head / problem.heads_q;
  const std::int64_t h = head % problem.heads_q;
  const DeviceLengths& lengths = rows.lengths;
  const DeviceSequence sequence(problem, lengths, b);
  const bool valid = row < sequence.rows;  // a warp's rows are of one head: the other rows of it stay for the shuffles
  const auto at = [&](const void* tensor, const Strides& strides) {
    return static_cast<const T*>(tensor) + entry_offset(lengths, strides, b, sequence.first_row) + h * strides.head +
           row * strides.row;
  };

  if (rows.stats != nullptr) {
    constexpr float kLog2E = 1.4426950408889634F;
    const float product =
        dot(at(rows.o, problem.o), at(rows.d_o, problem.o), valid ? problem.head_dim_v : 0, aligned.o);
    const std::int64_t place =
        lengths.packed ? h * rows.padded_rows + padded_start(b, sequence.first_row) + row : index;
    const bool has_place = !lengths.packed || row < (sequence.rows + kPaddedRows - 1) / kPaddedRows * kPaddedRows;
    if (lane == 0 && !valid && has_place) {
      store_stats(rows, place, -INFINITY, 0);
    } else if (lane == 0 && valid) {
      const std::int64_t line =
          lse_offset(lengths, problem, b, sequence.first_row) + h * lse_stride(lengths, problem) + row;
      const float lse = rows.lse[line];
      const float d = product - (rows.d_lse == nullptr ? 0.0F : rows.d_lse[line]);
      const float lse_log2 = lse * kLog2E;
      const bool is_lowest = lse_log2 == -INFINITY && lse != -INFINITY;
      const bool takes_part = is_lowest || !(fabsf(lse_log2) >= kMaxLse);
      // The lowest bias hides nothing: its LSE stays finite.
      const float shift = is_lowest ? FLT_MAX : -lse_log2;
      store_stats(rows, place, takes_part ? shift : -INFINITY, takes_part ? d : 0);
      if (rows.delta != nullptr) {
        rows.delta[line] = d;
      }
    }
  }
  if (rows.spread == nullptr) {
    return;
  }

  const int chunks = (problem.head_dim + kChunk - 1) / kChunk;
  T* result = s_rows[own][0];
  if (valid) {
    const T* q = at(rows.q, problem.q);
    if (aligned.q) {
      for (int chunk = lane; chunk < chunks; chunk += kLanes) {
        reinterpret_cast<uint4*>(result)[chunk] = reinterpret_cast<const uint4*>(q)[chunk];
      }
    } else {
      for (int c = lane; c < chunks * kChunk; c += kLanes) {
        result[c] = s_rows[own][1][c] = c < problem.head_dim ? q[c] : T(0.0F);
      }
    }
  }
  __syncwarp();
  const unsigned block = static_cast<unsigned>(row) / problem.rows_of_block;
  if (valid && !(problem.first_block_is_exact && block == 0)) {
    spread_row(problem, rows.order + (head * problem.blocks + block) * problem.head_dim, s_rows[own][0],
               s_rows[own][1]);
    result = s_rows[own][1];
  }
  __syncwarp();
  auto* const to = static_cast<uint4*>(rows.spread) + (head * problem.seq_q + row) * chunks;
  for (int chunk = lane; valid && chunk < chunks; chunk += kLanes) {
    to[chunk] = reinterpret_cast<const uint4*>(result)[chunk];
  }
}

}  // namespace

std::int64_t stats_rows_of(const DeviceProblem& problem) noexcept {
  return common::ceil_div(problem.seq_q, std::int64_t{kStatsRows}) * kStatsRows;
}

void preprocess_rows(DType dtype, const QueryRows& rows, void* stream) {
  static_assert(kStatsRows % kRows == 0);
  const std::int64_t count = rows.problem.batch * rows.problem.heads_q * rows.stats_rows;
  const auto is_aligned = [](const void* tensor) { return reinterpret_cast<std::uintptr_t>(tensor) % 16 == 0; };
  const Alignment aligned{has_aligned_rows(rows.problem.q) && is_aligned(rows.q) && rows.problem.head_dim % kChunk == 0,
                          has_aligned_rows(rows.problem.o) && is_aligned(rows.o) && is_aligned(rows.d_o)};
  if (count > 0) {
    launch_dependent(dtype == DType::f16 ? preprocess_kernel<__half> : preprocess_kernel<__nv_bfloat16>,
                     dim3(static_cast<unsigned>(count / kRows)), kThreads, 0, stream, rows, aligned);
  }
}

void spread_rows(DType dtype, const DeviceProblem& problem, const void* q, const std::int32_t* order, void* spread,
                 void* stream) {
  QueryRows rows{};
  rows.problem = problem;
  rows.q = q;
  rows.order = order;
  rows.stats_rows = common::ceil_div(problem.seq_q, std::int64_t{kRows}) * kRows;
  rows.spread = spread;
  preprocess_rows(dtype, rows, stream);
}

}  // namespace distr::cuda
