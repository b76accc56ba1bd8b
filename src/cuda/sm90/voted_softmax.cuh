// SPDX-License-Identifier: Apache-2.0
// The online softmax of 64 rows whose halves of tiles are kept or skipped as they come (voting_consumer.cuh). The
// layout of scores is that of softmax.cuh.
#pragma once

#include <cmath>

#include "cuda/ptx.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {

// P = 2^(scale * S - reference). A reference is the row max of when it was raised last, times the scale, plus the
// logarithm of P's headroom. There is one pass, so the headroom is a compromise: sums of 2^20 values leave fp32's range
// where values are near its end, and values below 2^-115 lose digits. Of fp16, whose P has no room for it, all values
// are small enough.
template <class C>
class VotedSoftmax {
 public:
  static constexpr float kHeadroom = sm90::kHeadroom<C> == 1 ? 1.0F : 0x1p20F;

  __device__ explicit VotedSoftmax(float scale_log2) : scale_(scale_log2) {}

  // largest: of a thread's scores, of its two rows. Whether one is so far above that its reference has to be raised.
  [[nodiscard]] __device__ __forceinline__ bool is_exceeded_by(const float (&largest)[2]) const {
    return is_exceeded_by(largest[0], 0) || is_exceeded_by(largest[1], 1);
  }

  // largest: of the rows. The caller multiplies O by `factor`. A row is rescaled for its own sake alone: its bits must
  // not depend on the rows beside it, which may be later ones.
  __device__ __forceinline__ void raise(const float (&largest)[2], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = 1;
      if (is_exceeded_by(largest[r], r)) {
        factor[r] = ptx::exp2(raise(r, largest[r]));
        row_sum_[r] *= factor[r];
      }
    }
  }

  // Scores become P.
  __device__ __forceinline__ void exponentials(float (&s)[C::kHalf / 2]) {
    if (large_ != 0) {
#pragma unroll
      for (int i = 0; i < C::kHalf / 2; ++i) {
        s[i] -= is_large(i / 2 % 2) ? reference_[i / 2 % 2] : 0.0F;
      }
    }
    const float subtracted[2] = {is_large(0) ? kHeadroomLog2 : reference_[0],
                                 is_large(1) ? kHeadroomLog2 : reference_[1]};
#pragma unroll
    for (int i = 0; i < C::kHalf / 2; ++i) {
      s[i] = C::Stages::exponential(fmaf(s[i], scale_, -subtracted[i / 2 % 2]), [](float x) { return ptx::exp2(x); });
      row_sum_[i / 2 % 2] += s[i];
    }
  }

  // The logarithm of the sum of a row's exponentials so far, plus `more_log2`, in units of scores; no key seen: -inf.
  [[nodiscard]] __device__ __forceinline__ float log_of_sum(int r, float more_log2) const {
    const float sum = quad_sum(row_sum_[r]) * kHeadroom;
    return sum == 0.0F ? -INFINITY : row_max(r) + (log2f(sum) + more_log2) / scale_;
  }
  // Whether a row has seen a score, and none below 0 would raise its reference.
  [[nodiscard]] __device__ __forceinline__ bool is_above_zero(int r) const { return row_max(r) >= 0; }

  // Scores of the row are `by` more from here on. A row that has seen none keeps its reference.
  __device__ __forceinline__ void shift_scores(int r, float by) { reference_[r] += is_large(r) ? by : by * scale_; }

  // As an epilogue takes it, where O is kHeadroom times as small.
  [[nodiscard]] __device__ __forceinline__ Softmax<C> result() const {
    Softmax<C> softmax(scale_);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      softmax.row_max[r] = row_max(r);
      softmax.row_sum[r] = row_sum_[r] * kHeadroom;
    }
    return softmax;
  }

 private:
  static constexpr float kHeadroomLog2 = kHeadroom == 1 ? 0.0F : 20.0F;

  // Where scale * row max is so large that its rounding would move P, the row max itself is kept, and scores are
  // subtracted before they are scaled.
  [[nodiscard]] __device__ __forceinline__ bool is_large(int r) const { return (large_ >> r & 1) != 0; }
  [[nodiscard]] __device__ __forceinline__ float row_max(int r) const {
    return is_large(r) ? reference_[r] : (reference_[r] - kHeadroomLog2) / scale_;
  }
  [[nodiscard]] __device__ __forceinline__ bool is_exceeded_by(float score, int r) const {
    const float exponent =
        fmaf(score - (is_large(r) ? reference_[r] : 0.0F), scale_, is_large(r) ? -kHeadroomLog2 : -reference_[r]);
    return exponent > Softmax<C>::kRescaleThreshold - kHeadroomLog2;
  }
  // Returns the logarithm of what P of the scores before is multiplied by.
  __device__ __forceinline__ float raise(int r, float row_max) {
    const float before = reference_[r];
    const bool was_large = is_large(r);
    const bool large = fabsf(row_max * scale_) >= Softmax<C>::kMaxShift;
    large_ = (large_ & ~(1U << r)) | (large ? 1U << r : 0);
    reference_[r] = large ? row_max : fmaf(row_max, scale_, kHeadroomLog2);
    if (was_large) {
      return large ? (before - row_max) * scale_ : fmaf(before, scale_, kHeadroomLog2 - reference_[r]);
    }
    return large ? -fmaf(row_max, scale_, kHeadroomLog2 - before) : before - reference_[r];
  }

  float scale_;
  float reference_[2] = {-0x1.fffffep127F, -0x1.fffffep127F};  // a row max that no score is below
  float row_sum_[2] = {};                                      // of this lane's part of the rows
  unsigned large_ = 3;  // which rows are, a bit each; those that have seen no score among them
};

}  // namespace distr::cuda::sm90
