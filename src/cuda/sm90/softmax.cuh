// SPDX-License-Identifier: Apache-2.0
// The online softmax of 64 rows of scores in the layout of wgmma's accumulators: a thread holds the columns
// 8 n + 2 (lane % 4) (+ 1) of the rows lane / 4 and lane / 4 + 8 of its warp, s[4 n + 2 half (+ 1)].
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/exp2.cuh"
#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/softcap.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {

// What is subtracted from a row's scores.
enum class RowMax : std::uint8_t {
  online,  // a maximum that follows the scores, but only when they have grown by 2^kRescaleThreshold, so that O is
           // hardly ever rescaled
  fixed,  // that of the first scores. It costs no more maxima, and does for rows whose scores are not far above it, and
          // where it is not so large that the rounding of scale * row_max moves P: rows_in_range()
  known,  // nothing of the scores, but what the row's dropped columns give them (near_far.cuh)
  none,   // nothing, which saves the subtraction too and does for sums within the range below: rows_in_range()
};

// In a repeated pass P is so much smaller where it is multiplied by V, and O with it: sums of values whose mean is
// finite may leave fp32's range. A power of two, so nothing is rounded otherwise. P is 2^kRescaleThreshold at most, so
// that does for 2^24 keys. Of fp16, whose P has no room for it, all values are small enough.
template <class C>
inline constexpr float kHeadroom = std::is_same_v<typename C::Element, __nv_bfloat16> ? 0x1p32F : 1.0F;

// P = 2^(scale * S - scale * row_max).
template <class C>
struct Softmax {
  static constexpr float kRescaleThreshold = 8.0F;
  static constexpr float kMaxSum = 0x1p64F;
  static constexpr float kMinSum = 0x1p-32F;
  static constexpr float kMaxShift = 0x1p20F;  // scale * row_max, which is rounded by 1/32 at most
  static constexpr float kMaxKnown = 0x1p14F;  // of near keys alone, whose rounding far ones do not share

  float scale;  // of the scores, to logarithms to the base 2; positive
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {};  // of this lane's part of the rows

  __device__ explicit Softmax(float scale_log2) : scale(scale_log2) {}

  // A row max that can be subtracted: 0 for rows that have seen no key yet.
  [[nodiscard]] __device__ static float finite(float row_max) { return row_max == -INFINITY ? 0.0F : row_max; }

  // Takes scores into the row max. Whether O must be multiplied by `factor`, the same for all threads of the warp.
  [[nodiscard]] __device__ bool update_row_max(const float (&s)[C::kHalf / 2], float (&factor)[2]) {
    float half_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < C::kHalf / 2; i += 2) {
      half_max[i / 2 % 2] = fmaxf(half_max[i / 2 % 2], fmaxf(s[i], s[i + 1]));
    }
    bool any_rescales = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      half_max[half] = quad_max(half_max[half]);
      any_rescales |= is_above(half_max[half], half);
    }
    const bool rescales = __any_sync(~0U, any_rescales);
    if (rescales) {
      raise_row_max(half_max, factor);
    }
    return rescales;
  }

  // Whether a score is so far above the row max that this has to grow.
  [[nodiscard]] __device__ bool is_above(float score, int half) const {
    return (score - row_max[half]) * scale > kRescaleThreshold;
  }

  // Raises the row max of rows whose largest new score is so far above it. The caller multiplies O by `factor`.
  __device__ void raise_row_max(const float (&largest)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A row is rescaled for its own sake alone: its bits must not depend on the rows beside it, which may be later
      // ones.
      const float next = is_above(largest[half], half) ? largest[half] : row_max[half];
      factor[half] = ptx::exp2((row_max[half] - finite(next)) * scale);
      row_max[half] = next;
      row_sum[half] *= factor[half];
    }
  }

  [[nodiscard]] __device__ bool has_row_max_below(int half, float bound) const {
    return fabsf(row_max[half] * scale) < bound;
  }

  // Scores become what they are above their row max, without a rounding where it matters.
  __device__ void subtract_row_max(float (&s)[C::kHalf / 2]) const {
#pragma unroll
    for (int i = 0; i < C::kHalf / 2; ++i) {
      s[i] -= finite(row_max[i / 2 % 2]);
    }
  }

  // What is subtracted from the exponents of a thread's two rows.
  [[nodiscard]] __device__ float2 shift() const {
    return make_float2(finite(row_max[0]) * scale, finite(row_max[1]) * scale);
  }

  // Scores become P. shift: shift(), or 0 behind subtract_row_max().
  template <RowMax kRowMax>
  __device__ void exponentials(float (&s)[C::kHalf / 2], float2 shift) {
    const auto exponent = [&](int i) {
      const float of_row = i / 2 % 2 == 0 ? shift.x : shift.y;
      if constexpr (C::kScaleIn == ScaleIn::softmax) {
        return fmaf(s[i], scale, -of_row);
      } else {
        return kRowMax == RowMax::none ? s[i] : s[i] - of_row;
      }
    };
#pragma unroll
    for (int i = 0; i < C::kHalf / 2; ++i) {
      s[i] = C::Stages::exponential(
          exponent(i), [&](float x) { return C::by_polynomial(i) ? exp2_by_polynomial(x) : ptx::exp2(x); });
      row_sum[i / 2 % 2] += s[i];
    }
  }

  // Caps scores, where they are to be.
  __device__ void cap(float (&s)[C::kHalf / 2], const ScoreCap& cap) const {
    if (C::kCapsScores && cap.cap != 0) {
      cap_scores(s, cap);
    }
  }

  // The same of scores that are still to be capped, with a fixed row max.
  __device__ void capped_exponentials(float (&s)[C::kHalf / 2], const ScoreCap& cap, float2 shift) {
    const auto make_all = [&](auto has_large) {
#pragma unroll
      for (int i = 0; i < C::kHalf / 2; ++i) {
        const float of_row = i / 2 % 2 == 0 ? shift.x : shift.y;
        const float small = fmaf(s[i], cap_factor(s[i], cap.factor_log2), -of_row);
        s[i] = ptx::exp2(has_large && fabsf(s[i]) > cap.small ? fmaf(cap_large(s[i], cap), scale, -of_row) : small);
        row_sum[i / 2 % 2] += s[i];
      }
    };
    if (are_small(s, cap)) {
      make_all(std::false_type{});
    } else {
      make_all(std::true_type{});
    }
  }
};

// Gives P of a repeated pass its headroom. The row sums, and LSE with them, are without.
template <class C>
__device__ __forceinline__ void make_headroom(float (&s)[C::kHalf / 2], RowMax row_max) {
  constexpr float kFactor = 1.0F / kHeadroom<C>;
  if (kFactor != 1 && row_max == RowMax::online) {
#pragma unroll
    for (float& p : s) {
      p *= kFactor;
    }
  }
}

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

// Hides those of the keys first .. first + kKeys - 1 that come before a row's sliding window: scores from s[from] on.
template <int kKeys, int kCount, class Keys>
__device__ __forceinline__ void hide_before_window(float (&s)[kCount], int from, const Keys& keys, int row, int first) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t hidden = first_visible_key(keys, std::int64_t{row} + half * 8) - first;
    const int before = static_cast<int>(max(min(hidden, std::int64_t{kKeys}), std::int64_t{0})) - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = s[from + n * 4 + half * 2 + i];
        score = n * 8 + i < before ? -INFINITY : score;
      }
    }
  }
}

// And all that a row does not see. keys: a DeviceProblem or VisibleKeys.
template <int kKeys, Windows kWindows = Windows::taken, int kCount, class Keys>
__device__ __forceinline__ void apply_mask(float (&s)[kCount], int from, const Keys& keys, int row, int first) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t seen =
        keys.causal ? min(keys.seq_k, std::int64_t{row} + half * 8 + keys.causal_offset + 1) : keys.seq_k;
    const int left = static_cast<int>(max(min(seen - first, std::int64_t{kKeys}), std::int64_t{0})) - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = s[from + n * 4 + half * 2 + i];
        score = n * 8 + i < left ? score : -INFINITY;
      }
    }
  }
  if (kWindows == Windows::taken && has_left_end(keys)) {
    hide_before_window<kKeys>(s, from, keys, row, first);
  }
}

}  // namespace distr::cuda::sm90
