// SPDX-License-Identifier: Apache-2.0
// What the rows of a consumer have where keys are near or far (method, 8): thresholds, and which far halves they keep.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {

// What a thread's two rows have beside their softmax.
struct NearRow {
  float dropped[2] = {};                        // q times the means of dropped columns of K
  float threshold[2] = {-INFINITY, -INFINITY};  // of a far score that keeps its half: without near keys all do
  int kept = 0;                                 // far halves, the same for all rows of the consumer
};

// Before the first pass's keys.
__device__ __forceinline__ void load_row(const ForwardParameters& p, const WorkTile& work, int first_row,
                                         NearRow& row) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t of = std::int64_t{first_row} + half * 8;
    row.threshold[half] = of < p.row_end ? -INFINITY : INFINITY;  // behind the last query nothing is kept
    if (p.dropped != nullptr && of < p.row_end) {
      row.dropped[half] = p.dropped[(work.batch * p.problem.heads_q + work.head) * p.problem.seq_q + of];
    }
  }
}

// What a thread's rows have of dropped columns to their row max, for LSE.
__device__ __forceinline__ void add_dropped(const NearRow& row, const DeviceProblem& problem, float (&row_max)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!problem.near.finishes && row_max[half] != -INFINITY) {
      row_max[half] += row.dropped[half];
    }
  }
}

// Subtracts a number from each of a thread's two rows.
template <int kCount>
__device__ __forceinline__ void subtract(float (&s)[kCount], const float (&of_row)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] -= of_row[i / 2 % 2];
  }
}

// Whether the consumer's 64 rows keep a half: a score of one is above its threshold.
template <class C>
[[nodiscard]] __device__ __forceinline__ bool keeps_half(const float (&s)[C::kHalf / 2], const NearRow& row,
                                                         int consumer) {
  constexpr int kFirstBarrier = 4;  // Stagger has those before
  float largest[8];                 // of each row four, so that they do not wait for each other
#pragma unroll
  for (int i = 0; i < C::kHalf / 2; ++i) {
    largest[i % 8] = i < 8 ? s[i] : fmaxf(largest[i % 8], s[i]);
  }
  const auto of_row = [&](int row_of_two) {
    const int i = 2 * row_of_two;
    return fmaxf(fmaxf(largest[i], largest[i + 1]), fmaxf(largest[i + 4], largest[i + 5]));
  };
  const bool is_above = of_row(0) > row.threshold[0] || of_row(1) > row.threshold[1];
  // Else the compiler takes what follows for divergent, and waits after every single wgmma.
  return uniform(static_cast<int>(ptx::named_barrier_any(kFirstBarrier + consumer, kWarpgroup, is_above))) != 0;
}

// The thresholds, once the softmax has seen all near keys.
template <class C>
__device__ __forceinline__ void set_thresholds(NearRow& row, const Softmax<C>& softmax, const DeviceNear& near) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(softmax.row_sum[half]);
    const float lse = Softmax<C>::finite(softmax.row_max[half]) * softmax.scale + log2f(sum);
    const float threshold = (lse + near.skip_log2) / softmax.scale - (near.finishes ? row.dropped[half] : 0.0F);
    row.threshold[half] = row.threshold[half] == INFINITY || sum == 0.0F ? row.threshold[half] : threshold;
  }
}

// The consumer's counts of far halves that its rows kept and see, by one thread.
template <class C>
__device__ __forceinline__ void store_halves(const Pass<C>& pass, int consumer, int kept) {
  const ForwardParameters& p = pass.p;
  const DeviceProblem& problem = p.problem;
  const int row = pass.work.row + consumer * 64;
  if (p.halves == nullptr || threadIdx.x % kWarpgroup != 0 || row >= p.row_end) {
    return;
  }
  const std::int64_t keys = visible_keys(problem, min(std::int64_t{row} + 64, p.row_end) - 1);  // of the last row
  const auto halves_before = [](std::int64_t end) { return static_cast<int>((end + C::kHalf - 1) / C::kHalf); };
  int seen = halves_before(keys);
  for (int n = 0; n < pass.near(); ++n) {
    const std::int64_t first = std::int64_t{pass.near_tiles.near(n)} * C::kKeys;
    seen -= halves_before(min(max(keys - first, std::int64_t{0}), std::int64_t{C::kKeys}));
  }
  const std::int64_t groups = (problem.seq_q + 63) / 64;
  std::int32_t* const to = p.halves + 2 * ((pass.work.batch * problem.heads_q + pass.work.head) * groups + row / 64);
  to[0] = kept;
  to[1] = seen;
}

}  // namespace distr::cuda::sm90
