// SPDX-License-Identifier: Apache-2.0
// The online softmax of 64 rows of scores in the layout of wgmma's accumulators: a thread holds the columns
// 8 n + 2 (lane % 4) (+ 1) of the rows lane / 4 and lane / 4 + 8 of its warp, s[4 n + 2 half (+ 1)].
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/exp2.cuh"
#include "cuda/sm90/config.h"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {

// What is subtracted from a row's scores: a maximum that follows them, one that stays, nothing.
enum class References : std::uint8_t { follow, stay, none };

// P = 2^(scale * S - scale * reference). The reference of a row is a maximum of its first scores. It follows those of
// later tiles where it is asked to, and then only when the maximum has grown by 2^kRescaleThreshold, so that O is
// hardly ever rescaled. References that stay cost no maximum, and do for rows whose scores are not far above them, nor
// so large that the rounding of scale * reference moves P; none at all saves the subtraction too, and does for sums
// within the range below: rows_in_range().
template <class C>
struct Softmax {
  static constexpr float kRescaleThreshold = 8.0F;
  static constexpr float kMaxSum = 0x1p64F;
  static constexpr float kMinSum = 0x1p-32F;
  static constexpr float kMostShift = 0x1p20F;  // scale * reference, rounded by 1/32 at most

  float scale;  // of the scores, to logarithms to the base 2; positive
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of this lane's part of the rows

  __device__ explicit Softmax(float scale_log2) : scale(scale_log2) {}

  // Rows that have seen no key yet take 0 for their reference.
  [[nodiscard]] __device__ static float finite(float reference) { return reference == -INFINITY ? 0.0F : reference; }

  // The references follow the scores. Whether O must be multiplied by `factor`, the same for all threads of the warp.
  [[nodiscard]] __device__ bool update(const float (&s)[C::kHalf / 2], float (&factor)[2]) {
    float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < C::kHalf / 2; i += 2) {
      best[i / 2 % 2] = fmaxf(best[i / 2 % 2], fmaxf(s[i], s[i + 1]));
    }
    bool rises = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = quad_max(best[half]);
      rises |= (best[half] - reference[half]) * scale > kRescaleThreshold;
    }
    const bool follow = __any_sync(~0U, rises);
    if (follow) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row moves for its own sake alone: its bits must not depend on the rows beside it, which may be later ones.
        const bool moves = (best[half] - reference[half]) * scale > kRescaleThreshold;
        const float next = moves ? best[half] : reference[half];
        factor[half] = ptx::exp2((reference[half] - finite(next)) * scale);
        reference[half] = next;
        sum[half] *= factor[half];
      }
    }
    return follow;
  }

  [[nodiscard]] __device__ bool has_small_reference(int half) const {
    return fabsf(reference[half] * scale) < kMostShift;
  }

  // Scores become what they are above their references, without a rounding where it matters.
  __device__ void subtract_references(float (&s)[C::kHalf / 2]) const {
#pragma unroll
    for (int i = 0; i < C::kHalf / 2; ++i) {
      s[i] -= finite(reference[i / 2 % 2]);
    }
  }

  // Scores become P. subtracted: by subtract_references().
  template <References kReferences>
  __device__ void exponentials(float (&s)[C::kHalf / 2], bool subtracted = false) {
    const float shift[2] = {subtracted ? 0.0F : finite(reference[0]) * scale,
                            subtracted ? 0.0F : finite(reference[1]) * scale};
    const auto exponent = [&](int i) {
      if constexpr (C::kScaleIn == ScaleIn::softmax) {
        return fmaf(s[i], scale, -shift[i / 2 % 2]);
      } else {
        return kReferences == References::none ? s[i] : s[i] - shift[i / 2 % 2];
      }
    };
#pragma unroll
    for (int i = 0; i < C::kHalf / 2; ++i) {
      s[i] = C::Stages::exponential(
          exponent(i), [&](float x) { return C::by_polynomial(i) ? exp2_by_polynomial(x) : ptx::exp2(x); });
      sum[i / 2 % 2] += s[i];
    }
  }
};

// Multiplies a thread's two rows of O by a factor each.
template <int kCount>
__device__ __forceinline__ void rescale(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    o[i] *= factor[i / 2 % 2];
  }
}

// P in 16 bits, the left operand of the second product.
template <class C>
__device__ __forceinline__ void pack(const float (&s)[C::kHalf / 2], std::uint32_t (&probabilities)[C::kHalf / 16][4]) {
#pragma unroll
  for (int i = 0; i < C::kHalf / 4; ++i) {
    probabilities[i / 4][i % 4] = ptx::pack(s[2 * i], s[2 * i + 1], typename C::Element{});
  }
}

// Hides those of the keys first .. first + kHalf - 1 that a row does not see.
template <class C>
__device__ __forceinline__ void apply_mask(float (&s)[C::kHalf / 2], const DeviceProblem& problem, int row, int first) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t seen =
        problem.causal ? min(problem.seq_k, std::int64_t{row} + half * 8 + problem.causal_offset + 1) : problem.seq_k;
    const int left = static_cast<int>(max(min(seen - first, std::int64_t{C::kHalf}), std::int64_t{0})) - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < C::kHalf / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = s[n * 4 + half * 2 + i];
        score = n * 8 + i < left ? score : -INFINITY;
      }
    }
  }
}

}  // namespace distr::cuda::sm90
