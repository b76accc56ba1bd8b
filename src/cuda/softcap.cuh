// SPDX-License-Identifier: Apache-2.0
// Capped scores: cap * tanh(score / cap) (method, 4).
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/score_cap.h"

namespace distr::cuda {

// cap * tanh(s / cap) where |s| <= cap, as nearly all scores of models are: tanh(x) / x in x^2, by least largest
// relative error, 7e-7.
[[nodiscard]] __device__ __forceinline__ float cap_small(float s, float inverse_cap) {
  const float x = s * inverse_cap;
  const float y = x * x;
  float p = fmaf(y, -0.0030670602F, 0.016743116F);
  p = fmaf(y, p, -0.051605675F);
  p = fmaf(y, p, 0.13281435F);
  p = fmaf(y, p, -0.33329043F);
  return s * fmaf(y, p, 0.9999994F);
}

// The same of any score, cap - 2 cap / (1 + e^(2 s / cap)), whose error is cap * 2e-7.
[[nodiscard]] __device__ __forceinline__ float cap_large(float s, ScoreCap of) {
  constexpr float kTwoLog2E = 2.88539008F;
  return fmaf(-2 * of.cap, ptx::reciprocal(1.0F + ptx::exp2(s * of.inverse * kTwoLog2E)), of.cap);
}

// Caps a thread's scores. What a score becomes depends on itself alone; the warp only leaves out the second form where
// none of its scores needs it.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], ScoreCap of) {
  float largest = 0;
#pragma unroll
  for (const float x : s) {
    largest = fmaxf(largest, fabsf(x));
  }
  if (__any_sync(~0U, largest > of.cap)) {
#pragma unroll
    for (float& x : s) {
      x = fabsf(x) > of.cap ? cap_large(x, of) : cap_small(x, of.inverse);
    }
  } else {
#pragma unroll
    for (float& x : s) {
      x = cap_small(x, of.inverse);
    }
  }
}

}  // namespace distr::cuda
