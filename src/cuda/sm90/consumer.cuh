// SPDX-License-Identifier: Apache-2.0
// What all consumers of the forward kernel share.
#pragma once

#include <type_traits>

#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/softmax.cuh"

namespace distr::cuda::sm90 {

// Of the first pass, in tiles without a mask.
template <class C>
inline constexpr RowMax kFirstPass = C::kScaleIn == ScaleIn::softmax ? RowMax::fixed : RowMax::none;

inline constexpr unsigned kAllRows = 3;  // of a thread, a bit each

// Which of a thread's two rows the row max of the first pass was good enough for, a bit each. Of a fixed one: no score
// was so far above it that P left the element's range, which O shows, or O fp32's; the row had one, unless it was
// online in all tiles, and it was not too large. Where there was none: the row sum is neither too large nor too small.
// Each row is judged by itself, because its bits must not depend on those beside it, which may be later ones.
template <class C>
__device__ inline unsigned rows_in_range(const float (&o)[C::kValues / 2], const Softmax<C>& softmax, bool all_online) {
  if (!C::Stages::kRepeatsRows) {
    return kAllRows;
  }
  const unsigned lane = threadIdx.x % 32;
  const unsigned quad = 0xFU << lane / 4 * 4;
  unsigned rows = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float zero = 0;  // NaN where O is not finite
#pragma unroll
    for (int i = 0; i < C::kValues / 2; ++i) {
      zero = i / 2 % 2 == half ? fmaf(o[i], 0.0F, zero) : zero;
    }
    const float sum = quad_sum(softmax.row_sum[half]);
    const bool is_enough = kFirstPass<C> == RowMax::none
                               ? sum > Softmax<C>::kMinSum
                               : softmax.has_small_row_max(half) || (all_online && softmax.row_max[half] == -INFINITY);
    const bool fits = zero == 0.0F && sum < Softmax<C>::kMaxSum && is_enough;
    rows |= (__ballot_sync(~0U, fits) & quad) == quad ? 1U << half : 0;
  }
  return rows;
}

// What a consumer hides of its part of a tile where it takes all keys: those that a row does not see. See HiddenHalves
// (listed_keys.cuh).
template <class C>
class HiddenKeys {
 public:
  __device__ __forceinline__ HiddenKeys(const Pass<C>& pass, int n, int first, int /*consumer*/)
      : first_(pass.first_key(n, first)), has_mask_(n < pass.masked) {}

  __device__ __forceinline__ void hide(float (&)[C::kHalf / 2]) const {}
  __device__ __forceinline__ void hide_with_mask(float (&s)[C::kHalf / 2], const DeviceProblem& problem,
                                                 int row) const {
    if (has_mask_) {
      apply_mask<C::kHalf, C::kWindows>(s, 0, problem, row, first_);
    }
  }

 private:
  int first_;
  bool has_mask_;
};

// The same of a band of keys. Which keys the part has is computed only where there is a mask: the order of a window's
// tiles has no registers beside both halves' scores. Runs know theirs beforehand, as blocks that share an SM would
// spill.
template <class C>
class HiddenKeysOfBand {
 public:
  __device__ __forceinline__ HiddenKeysOfBand(const Pass<C>& pass, int n, int first, int /*consumer*/)
      : pass_(pass), n_(n), first_(first) {}

  __device__ __forceinline__ void hide(float (&)[C::kHalf / 2]) const {}
  template <class Keys>
  __device__ __forceinline__ void hide_with_mask(float (&s)[C::kHalf / 2], const Keys& keys, int row) const {
    if (n_ < pass_.masked) {
      apply_mask<C::kHalf>(s, 0, keys, row, pass_.first_key(n_, first_));
    }
  }

 private:
  const Pass<C>& pass_;
  int n_, first_;
};

template <class C>
using HiddenOfAll =
    std::conditional_t<C::kWindows == Windows::taken && !C::kIsRuns, HiddenKeysOfBand<C>, HiddenKeys<C>>;

// The halves of a tile, as arguments whose value is known when the kernel is compiled. The upper one is taken first, as
// the last tile is.
template <int kFirstKey>
using Half = std::integral_constant<int, kFirstKey>;
// Products that were issued behind one, and may be under way still.
template <int kProducts>
using Pending = std::integral_constant<int, kProducts>;

// The tiles from n on, of which there is one at least: products are issued before the exponentials of the half before
// theirs. The functions are consume()'s.
template <class C, class ScoreScale, class Output, class Exponentials>
__device__ __forceinline__ void consume_ahead(int n, int tiles, const ScoreScale& issue_scores,
                                              const Output& issue_output, const Exponentials& exponentials) {
  constexpr Half<C::kHalf> upper;
  constexpr Half<0> lower;
  issue_scores(upper, n);
#pragma unroll 1
  for (; n < tiles - 1; ++n) {
    issue_output(lower, n - 1);
    issue_scores(lower, n);
    exponentials(upper, n, Pending<2>{});
    issue_output(upper, n);
    issue_scores(upper, n + 1);
    exponentials(lower, n, Pending<2>{});
  }
  issue_output(lower, n - 1);
  issue_scores(lower, n);
  exponentials(upper, n, Pending<2>{});
  issue_output(upper, n);
  exponentials(lower, n, Pending<1>{});
}

}  // namespace distr::cuda::sm90
