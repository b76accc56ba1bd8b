// SPDX-License-Identifier: Apache-2.0
// What the backward needs once for every row of Q, before its kernels; of it the forward may need Q~.
#pragma once

#include "cuda/sm80/backward_config.h"

namespace distr::cuda::sm80 {

// Of the statistics of a head's rows.
enum class Stats : std::uint8_t {
  pairs,  // [stats_rows]: both of a row
  tiles,  // [stats_rows / 64][2][4][4][2][2] floats: first all of the one, in the order in which the tensor cores deal
          // out the columns of an accumulator: row 16 m + 8 n + 2 lane + i of a tile at [m][lane][n][i]
};

struct RowsOfBackward {
  DeviceProblem problem;  // with the caller's strides
  const void* q;          // read only where `spread` is wanted
  const void* o;
  const void* d_o;
  const float* lse;
  const float* d_lse;         // or null
  const std::int32_t* order;  // read only where `spread` is wanted
  std::int64_t stats_rows;
  // out
  float2* stats;  // [B, Hq, stats_rows], see BackwardParameters; null: Q~ alone is wanted, and o to d_lse are not read
  float* delta;   // D [B, Hq, Nq], or null
  void* spread;   // Q~ [B, Hq, Nq, d], packed (prepare.h), or null: it is not wanted
  Stats layout = Stats::pairs;
};

inline constexpr int kPreparedRows = 32;  // of a thread block

void prepare_rows(DType dtype, const RowsOfBackward& rows, void* stream);
// Q~ alone, in groupings of any blocks; rows that attend exactly are Q's own.
void spread_rows(DType dtype, const DeviceProblem& problem, const void* q, const std::int32_t* order, void* spread,
                 void* stream);

}  // namespace distr::cuda::sm80
