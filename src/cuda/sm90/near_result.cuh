// SPDX-License-Identifier: Apache-2.0
// Attention to near keys alone, and how the launch of far keys takes it in (method, 8).
//
//   near:  m_n, l_n: row max and row sum;  O_n
//   far:   m_f, l_f, O_f l_f, of scores without what dropped columns keep, a constant c of the row (`dropped`)
//   O = (O_n l_n 2^(m_n - m) + O_f l_f 2^(m_f + c - m)) / l      l = l_n 2^(m_n - m) + l_f 2^(m_f + c - m)
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/softmax.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {

// Where near keys' results of a row lie.
[[nodiscard]] __device__ inline std::int64_t near_row(const ForwardParameters& p, const WorkTile& work,
                                                      std::int64_t row) {
  return (std::int64_t{work.batch} * p.problem.heads_q + work.head) * p.problem.seq_q + row;
}

// What dropped columns give the far scores of a row, in units of the near ones.
[[nodiscard]] __device__ __forceinline__ float dropped_of(const ForwardParameters& p, const WorkTile& work,
                                                          std::int64_t row) {
  return p.listed.dropped == nullptr || row >= p.row_end ? 0.0F : p.listed.dropped[near_row(p, work, row)];
}

// The row max that a launch of far keys begins with, so that rows that take none of its first keys have one. In units
// of the scores, like Softmax's.
template <class C>
__device__ __forceinline__ void begin_with_near_row_max(const ForwardParameters& p, const WorkTile& work, int first_row,
                                                        Softmax<C>& softmax) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = std::int64_t{first_row} + half * 8;
    if (row < p.row_end) {
      const std::int64_t at = near_row(p, work, row);
      const float row_max = p.listed.near.stats[at].x - dropped_of(p, work, row);
      softmax.row_max[half] = isnan(row_max) ? -INFINITY : row_max;  // far scores tell whether the row has NaN
    }
  }
}

// The epilogue of near keys.
template <class C>
__device__ inline void store_near(const ForwardParameters& p, const WorkTile& work, int first_row, unsigned rows,
                                  const float (&o)[C::kValues / 2], const Softmax<C>& softmax, float headroom) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = std::int64_t{first_row} + half * 8;
    const float sum = quad_sum(softmax.row_sum[half]);
    if (row >= p.row_end || (rows >> half & 1) == 0) {
      continue;
    }
    const std::int64_t at = near_row(p, work, row);
    if (lane == 0) {
      p.listed.near.stats[at] = make_float2(sum == 0.0F ? -INFINITY : softmax.row_max[half], sum);
    }
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum * headroom;
    float* const to = p.listed.near.o + at * C::kValues + lane * 2;
#pragma unroll
    for (int n = 0; n < C::kValues / 8; ++n) {
      *reinterpret_cast<float2*>(to + n * 8) =
          make_float2(o[n * 4 + half * 2] * inverse, o[n * 4 + half * 2 + 1] * inverse);
    }
  }
}

// What a row's O of near keys and its sums of far ones are multiplied with, and its LSE.
struct Merged {
  float near, far;
  float lse;
};

template <class C>
[[nodiscard]] __device__ inline Merged merged(const ForwardParameters& p, std::int64_t at, float far_max,
                                              float far_sum) {
  const float2 near = p.listed.near.stats[at];
  const float dropped = p.listed.dropped == nullptr ? 0.0F : p.listed.dropped[at];
  const float scale = p.problem.scale_log2;
  static_assert(C::kScaleIn == ScaleIn::softmax);
  // How far the near row max is above the far one; they are subtracted unscaled, as they can be large.
  const float above = (near.x - dropped - far_max) * scale;
  const bool has_near = near.y != 0.0F;
  const bool has_far = far_sum != 0.0F;
  const bool near_is_larger = has_near && (!has_far || above > 0.0F);
  const float near_factor = !has_near ? 0.0F : near_is_larger ? 1.0F : ptx::exp2(above);
  const float far_factor = !has_far ? 0.0F : near_is_larger ? ptx::exp2(-above) : 1.0F;
  const float near_sum = has_near ? near.y * near_factor : 0.0F;
  const float sum = near_sum + (has_far ? far_sum * far_factor : 0.0F);
  const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
  const float row_max = near_is_larger ? near.x * scale : far_max * scale + dropped * scale;
  return {near_sum * inverse, far_factor * inverse, natural_lse(row_max, sum)};
}

// The epilogue of far keys.
template <class C>
__device__ inline void store_merged(const ForwardParameters& p, const WorkTile& work, int first_row, unsigned rows,
                                    const float (&o)[C::kValues / 2], const Softmax<C>& softmax, float headroom) {
  using T = typename C::Element;
  const DeviceProblem& problem = p.problem;
  const int lane = static_cast<int>(threadIdx.x) % 4;
  T* const base = static_cast<T*>(p.o) + work.batch * problem.o.batch + work.head * problem.o.head;
  const int width = vector_width(base, problem.o.row);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = std::int64_t{first_row} + half * 8;
    const float sum = quad_sum(softmax.row_sum[half]);
    const bool is_valid = row < p.row_end && (rows >> half & 1) != 0;
    const std::int64_t at = near_row(p, work, is_valid ? row : std::int64_t{work.row});
    const Merged factors = merged<C>(p, at, Softmax<C>::finite(softmax.row_max[half]), sum);
    if (is_valid && p.lse != nullptr && lane == 0) {
      p.lse[at] = factors.lse;
    }
    const float* const near = p.listed.near.o + at * C::kValues + lane * 2;
    const float far = factors.far * headroom;
    store_row<C::kValues>(base + row * problem.o.row, is_valid, problem.head_dim_v, width, [&](int n) {
      const float2 of_near = *reinterpret_cast<const float2*>(near + n * 8);
      return make_float2(of_near.x * factors.near + o[n * 4 + half * 2] * far,
                         of_near.y * factors.near + o[n * 4 + half * 2 + 1] * far);
    });
  }
}

}  // namespace distr::cuda::sm90
