// SPDX-License-Identifier: Apache-2.0
// Capped scores: cap * tanh(score / cap) (method, 4). What a score becomes depends on itself alone; a warp only leaves
// out the form for large scores where it has none.
#pragma once

#include <type_traits>

#include "cuda/ptx.cuh"
#include "cuda/score_cap.h"

namespace distr::cuda {

// Whether none of the warp's scores needs the form for large ones.
template <int kCount>
[[nodiscard]] __device__ __forceinline__ bool are_small(const float (&s)[kCount], const ScoreCap& of) {
  float largest = 0;
#pragma unroll
  for (const float x : s) {
    largest = fmaxf(largest, fabsf(x));
  }
  return !__any_sync(~0U, largest > of.small);
}

// cap * tanh(s / cap) / s of a small score, or with factor_log2 that in logarithms to the base 2.
[[nodiscard]] __device__ __forceinline__ float cap_factor(float s, const float (&factor)[4]) {
  const float y = s * s;
  return fmaf(y, fmaf(y, fmaf(y, factor[3], factor[2]), factor[1]), factor[0]);
}

// cap - 2 cap / (1 + e^(2 s / cap)), whose error is cap * 2e-7.
[[nodiscard]] __device__ __forceinline__ float cap_large(float s, const ScoreCap& of) {
  constexpr float kTwoLog2E = 2.88539008F;
  return fmaf(-2 * of.cap, ptx::reciprocal(1.0F + ptx::exp2(s * of.inverse * kTwoLog2E)), of.cap);
}

template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], const ScoreCap& of) {
  const auto cap_all = [&](auto has_large) {
#pragma unroll
    for (float& x : s) {
      const float small = x * cap_factor(x, of.factor);
      x = has_large && fabsf(x) > of.small ? cap_large(x, of) : small;
    }
  };
  if (are_small(s, of)) {
    cap_all(std::false_type{});
  } else {
    cap_all(std::true_type{});
  }
}

}  // namespace distr::cuda
