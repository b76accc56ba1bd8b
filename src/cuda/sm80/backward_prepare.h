// SPDX-License-Identifier: Apache-2.0
// What the backward needs once for every row of Q, before its kernels.
#pragma once

#include "cuda/sm80/backward_config.h"

namespace distr::cuda::sm80 {

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
  float2* stats;  // [B, Hq, stats_rows], see BackwardParameters
  float* delta;   // D [B, Hq, Nq], or null
  void* spread;   // Q~ [B, Hq, Nq, d], packed (prepare.h), or null: attention is exact
};

inline constexpr int kPreparedRows = 32;  // of a thread block

void prepare_rows(DType dtype, const RowsOfBackward& rows, void* stream);

}  // namespace distr::cuda::sm80
