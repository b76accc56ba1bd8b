// SPDX-License-Identifier: Apache-2.0
// How the four warps of a consumer decide whether its 64 queries keep half a tile (method, 8): where one of the scores
// is above L + ln p of its row, L being the log-sum-exp of the row's near scores.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/voted_softmax.cuh"

namespace distr::cuda::sm90 {

// The largest of a thread's scores of each of its two rows; NaN where one is.
template <int kCount>
__device__ __forceinline__ void largest_of(const float (&s)[kCount], float (&largest)[2]) {
  float max[4] = {s[0], s[1], s[2], s[3]};  // chains that do not wait for each other
#pragma unroll
  for (int i = 4; i < kCount; ++i) {
    max[i % 4] = ptx::max_nan(max[i % 4], s[i]);
  }
  largest[0] = ptx::max_nan(max[0], max[1]);
  largest[1] = ptx::max_nan(max[2], max[3]);
}

// The same where it is above 0, else anything below: the bits of such numbers are in order, and an instruction takes
// three of them.
template <int kCount>
__device__ __forceinline__ void largest_above_zero(const float (&s)[kCount], float (&largest)[2]) {
  constexpr int kOfRow = kCount / 2;
  static_assert(kOfRow % 4 == 0);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto bits = [&](int i) { return ptx::ordered_bits(s[i / 2 * 4 + r * 2 + i % 2]); };
    int chain[2] = {bits(0), bits(1)};
#pragma unroll
    for (int i = 2; i + 2 <= kOfRow; i += 2) {
      chain[i / 2 % 2] = ptx::max3(chain[i / 2 % 2], bits(i), bits(i + 1));
    }
    largest[r] = __uint_as_float(static_cast<unsigned>(max(chain[0], chain[1])));
  }
}

struct KeptHalves {
  bool lower, upper;
};

template <class C>
class Vote {
 public:
  // Until there are thresholds, halves of which some row sees a key are kept.
  __device__ __forceinline__ Vote(const Shared<C>& shared, int consumer)
      : thresholds_(shared.shift()), barrier_(kFirstBarrier + consumer) {
    set(kLowest, kLowest);
  }

  // From the first far tile on. lacking: what the scores that votes are cast on lack of the softmax's.
  __device__ __forceinline__ void set_thresholds(const VotedSoftmax<C>& softmax, float skip_log2,
                                                 const float (&lacking)[2]) {
    float threshold[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_row = softmax.log_of_sum(r, skip_log2) - lacking[r];
      threshold[r] = of_row == -INFINITY ? kLowest : fmaxf(of_row, kLowest);
    }
    set(threshold[0], threshold[1]);
    const bool above = threshold[0] >= 0 && threshold[1] >= 0 && softmax.is_above_zero(0) && softmax.is_above_zero(1);
    are_above_zero_ = __any_sync(~0U, !above) == 0;
  }

  // Whether the half is kept. largest: of the thread's scores of its two rows, where it is. NaN keeps.
  [[nodiscard]] __device__ __forceinline__ bool cast(const float (&s)[C::kHalf / 2], float (&largest)[2]) const {
    return __any_sync(~0U, ptx::named_barrier_or(barrier_, kWarpgroup, keeps(s, largest))) != 0;  // one answer to see
  }
  // Which of a tile's halves are, in one vote.
  [[nodiscard]] __device__ __forceinline__ KeptHalves cast(const float (&lower)[C::kHalf / 2],
                                                           const float (&upper)[C::kHalf / 2], float (&of_lower)[2],
                                                           float (&of_upper)[2]) const {
    const bool keeps_lower = __any_sync(~0U, keeps(lower, of_lower)) != 0;
    const bool keeps_upper = __any_sync(~0U, keeps(upper, of_upper)) != 0;
    // One barrier counts both: a warp that keeps the lower half holds one thing, one that keeps the upper one eight.
    const unsigned lane = threadIdx.x % 32;
    const bool holds = lane == 0 ? keeps_lower : lane <= kWeight && keeps_upper;
    const unsigned count = ptx::named_barrier_count(barrier_, kWarpgroup, holds);
    return {__any_sync(~0U, count % kWeight != 0) != 0, __any_sync(~0U, count >= kWeight) != 0};
  }

 private:
  static constexpr unsigned kWeight = 8;  // more than there are warps

  // Whether one of the thread's scores keeps the half.
  [[nodiscard]] __device__ __forceinline__ bool keeps(const float (&s)[C::kHalf / 2], float (&largest)[2]) const {
    const uint2 threshold = ptx::load_shared_8(thresholds_);
    if (are_above_zero_) {
      largest_above_zero(s, largest);
    } else {
      largest_of(s, largest);
    }
    return !(largest[0] <= __uint_as_float(threshold.x)) || !(largest[1] <= __uint_as_float(threshold.y));
  }

  static constexpr int kFirstBarrier = 2;
  static constexpr float kLowest = -0x1.fffffep127F;  // above that of a row that sees no key, -inf

  // The four threads of the rows have the same. In shared memory, as there are no registers for them.
  __device__ __forceinline__ void set(float a, float b) const {
    if (threadIdx.x % 4 == 0) {
      ptx::store_shared_8(thresholds_, make_uint2(__float_as_uint(a), __float_as_uint(b)));
    }
    __syncwarp();
  }

  std::uint32_t thresholds_;
  int barrier_;
  bool are_above_zero_ = false;  // the thresholds of the warp's rows, and what would raise their reference
};

}  // namespace distr::cuda::sm90
