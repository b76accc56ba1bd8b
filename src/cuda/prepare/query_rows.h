// SPDX-License-Identifier: Apache-2.0
// What a backward needs of every row of Q before its kernels; of it a forward may need Q~.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/problem.h"
#include "cuda/sequence.cuh"
#include "cuda/workspace.h"
#include "kernel.h"

namespace distr::cuda {

// The rows of the statistics of a head: a multiple of every kernel's tile of queries.
inline constexpr int kStatsRows = 128;
static_assert(kStatsRows == kPaddedRows);
// Of a thread block.
inline constexpr int kPreprocessedRows = 32;

// How the statistics of a head's rows lie.
enum class StatsLayout : std::uint8_t {
  pairs,    // float2: -LSE to the base 2, and D; -inf and 0 where no key is seen
  columns,  // tiles of StatsColumns: -LSE / scale and -D for tensor cores; kHidingShift and 0 where no key is
            // seen. Where scores are capped the shifts are idle_columns()
};

struct QueryRows {
  DeviceProblem problem;  // with the caller's strides
  const void* q;          // read only where `spread` is wanted
  const void* o;
  const void* d_o;
  const float* lse;
  const float* d_lse;         // or null
  const std::int32_t* order;  // read only where `spread` is wanted
  std::int64_t stats_rows;
  // out
  void* stats;   // [B, Hq, stats_rows], in `layout`. Null: Q~ alone is wanted, and o to d_lse are not read
  float* delta;  // D [B, Hq, Nq], or null
  void* spread;  // Q~ [B, Hq, Nq, d], packed (operand.h), or null: it is not wanted
  StatsLayout layout = StatsLayout::pairs;
  DeviceLengths lengths{};
  std::int64_t padded_rows = 0;  // of packed sequences: those of a head in `stats`, where padded_start() says
};

[[nodiscard]] std::int64_t stats_rows_of(const DeviceProblem& problem) noexcept;

// `rows` with the tensors that a backward reads; what is written stays as it is.
[[nodiscard]] inline QueryRows with_inputs(QueryRows rows, const BackwardTensors& tensors) noexcept {
  rows.q = tensors.q;
  rows.o = tensors.o;
  rows.d_o = tensors.d_o;
  rows.lse = static_cast<const float*>(tensors.lse);
  rows.d_lse = static_cast<const float*>(tensors.d_lse);
  rows.order = tensors.order;
  rows.lengths.of = tensors.lengths;
  return rows;
}

void preprocess_rows(DType dtype, const QueryRows& rows, void* stream);

// Q~ alone, in groupings of any blocks; rows that attend exactly are Q's own.
void spread_rows(DType dtype, const DeviceProblem& problem, const void* q, const std::int32_t* order, void* spread,
                 void* stream);

}  // namespace distr::cuda
