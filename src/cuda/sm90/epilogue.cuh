// SPDX-License-Identifier: Apache-2.0
// How a consumer of the forward kernel stores O and LSE.
#pragma once

#include <cstdint>

#include "cuda/problem.h"
#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/tile.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

// The epilogue of a thread's two rows, of those in `rows`. headroom: O's.
template <class C>
__device__ inline void store(const Pass<C>& pass, int first_row, unsigned rows, const float (&o)[C::kValues / 2],
                             const Softmax<C>& softmax, float headroom) {
  using T = typename C::Element;
  const ForwardParameters& p = pass.p;
  const WorkTile& work = pass.work;
  const DeviceProblem& problem = p.problem;
  const std::int64_t row_end = pass.row_end();
  const std::int64_t lse_rows = C::kTakesLengths ? lse_stride(p.lengths, problem) : problem.seq_q;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* const base = static_cast<T*>(p.o) + work.batch * problem.o.batch + work.head * problem.o.head;
  const int width = vector_width(base, problem.o.row);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = std::int64_t{first_row} + half * 8;
    const float sum = quad_sum(softmax.row_sum[half]);
    const bool is_valid = row < row_end && (rows >> half & 1) != 0;
    if (is_valid && p.lse != nullptr && lane % 4 == 0) {
      p.lse[(work.batch * problem.heads_q + work.head) * lse_rows + row] =
          natural_lse(Softmax<C>::finite(softmax.row_max[half]) * softmax.scale, sum);
    }
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum * headroom;  // no key is seen: O = 0
    store_row<C::kValues>(base + row * problem.o.row, is_valid, problem.head_dim_v, width, [&](int n) {
      return make_float2(o[n * 4 + half * 2] * inverse, o[n * 4 + half * 2 + 1] * inverse);
    });
  }
}

}  // namespace distr::cuda::sm90
