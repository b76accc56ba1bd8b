// SPDX-License-Identifier: Apache-2.0
// What all consumers of the forward kernel share.
#pragma once

#include <type_traits>

#include "cuda/sm90/config.h"
#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/softmax.cuh"

namespace distr::cuda::sm90 {

// Of the first pass, in tiles without a mask.
template <class C>
inline constexpr RowMax kFirstPass = C::kFixesRowMax                   ? RowMax::fixed
                                     : C::kScaleIn == ScaleIn::softmax ? RowMax::known
                                                                       : RowMax::none;

inline constexpr unsigned kAllRows = 3;  // of a thread, a bit each

// Which of a thread's two rows the row max of the first pass was good enough for, a bit each. Of a fixed one: no score
// was so far above it that P left the element's range, which O shows, or O fp32's; the row had one, unless it was
// online in all tiles, and it was not too large. Where there was none: the row sum is neither too large nor too small.
// Where it was known: it was not too large, nor is the row sum; whether that is too small is asked behind far keys.
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
    const bool is_enough = kFirstPass<C> == RowMax::none    ? sum > Softmax<C>::kMinSum
                           : kFirstPass<C> == RowMax::known ? softmax.has_row_max_below(half, Softmax<C>::kMaxKnown)
                                                            : softmax.has_row_max_below(half, Softmax<C>::kMaxShift) ||
                                                                  (all_online && softmax.row_max[half] == -INFINITY);
    const bool fits = zero == 0.0F && sum < Softmax<C>::kMaxSum && is_enough;
    rows |= (__ballot_sync(~0U, fits) & quad) == quad ? 1U << half : 0;
  }
  return rows;
}

// Until q_hat is there.
template <class C>
__device__ __forceinline__ void wait_queries(const Shared<C>& shared) {
  ptx::barrier_wait(shared.queries_full(), C::kPhase == Phase::far ? 1 : 0);
}
// And then q_hat of a consumer.
template <class C>
[[nodiscard]] __device__ __forceinline__ Queries<C> read_queries(const Shared<C>& shared, int consumer) {
  wait_queries<C>(shared);
  return Queries<C>(shared.queries(consumer), 0);
}
// Once they are in registers, q_hat of far keys may take the place of near ones'.
template <class C>
__device__ __forceinline__ void free_queries(const Shared<C>& shared) {
  if constexpr (C::kPhase == Phase::near) {
    arrive_warp(shared.queries_empty());
  }
}
// Of a phase without keys.
template <class C>
__device__ __forceinline__ void pass_over_queries(const Shared<C>& shared) {
  wait_queries<C>(shared);
  __syncwarp();  // else the next ones may be there while a lane still waits for these
  free_queries<C>(shared);
}

// What a consumer hides of its part of a tile where it takes all keys: those that a row does not see. See HiddenHalves
// (listed_keys.cuh).
template <class C>
class HiddenKeys {
 public:
  __device__ __forceinline__ HiddenKeys(const Pass<C>& pass, const TileInRing<C>& tile, int first)
      : first_(pass.first_key(tile.n, first)), has_mask_(tile.n < pass.masked) {}

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
// tiles has no registers beside both halves' scores.
template <class C>
class HiddenKeysOfBand {
 public:
  __device__ __forceinline__ HiddenKeysOfBand(const Pass<C>& pass, const TileInRing<C>& tile, int first)
      : pass_(pass), n_(tile.n), first_(first) {}

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
using HiddenOfAll = std::conditional_t<C::kWindows == Windows::taken, HiddenKeysOfBand<C>, HiddenKeys<C>>;

// The halves of a tile, as arguments whose value is known when the kernel is compiled. The upper one is taken first, as
// the last tile is.
template <int kFirstKey>
using Half = std::integral_constant<int, kFirstKey>;
// Products that were issued behind one, and may be under way still.
template <int kProducts>
using Pending = std::integral_constant<int, kProducts>;

// What a fixed or known row max subtracts, of a thread's two rows. It stays in shared memory: one load fills two
// registers, an even one and the next, which lie in two banks, so that subtractions need not read them again
// (`.reuse`). Where the compiler chose two registers of one bank, kernels took 2 to 6 % longer (docs/kernel-log.md,
// sm90/forward, step 75).
template <class C>
class FixedShift {
 public:
  __device__ __forceinline__ FixedShift(const Shared<C>& shared, const Softmax<C>& softmax)
      : shared_(shared), softmax_(softmax) {}

  // Once the row max is fixed.
  __device__ __forceinline__ void fix() const {
    if constexpr (kIsShared) {
      if (threadIdx.x % 4 == 0) {  // the four threads of the rows have the same
        const float2 shift = softmax_.shift();
        ptx::store_shared_8(shared_.shift(), make_uint2(__float_as_uint(shift.x), __float_as_uint(shift.y)));
      }
      __syncwarp();
    }
  }
  [[nodiscard]] __device__ __forceinline__ float2 get() const {
    if constexpr (kIsShared) {
      const uint2 shift = ptx::load_shared_8(shared_.shift());
      return make_float2(__uint_as_float(shift.x), __uint_as_float(shift.y));
    } else {
      return softmax_.shift();
    }
  }

 private:
  static constexpr bool kIsShared = kFirstPass<C> != RowMax::none;

  const Shared<C>& shared_;
  const Softmax<C>& softmax_;
};

// Keeps consumers apart, so that the exponentials of one run beside the products of another; together they would wait
// for the tensor cores, and then these for them. At the start each waits until the one before it has its first scores.
// Shapes that have turns do it anew every kEvery tiles, of 512 keys: the products of the first half wait until the
// consumer before has this O += P V behind it, and those of the first consumer until the last one has that of the half
// before. Else some blocks drift, and a launch waits for the last (docs/kernel-log.md, sm90/forward, step 80).
// Two blocks that share an SM are apart anyway.
template <class C>
class Stagger {
 public:
  __device__ __forceinline__ explicit Stagger(int consumer) : consumer_(consumer) {}

  __device__ __forceinline__ void wait_at_start() const {
    if (kStartsApart && consumer_ > 0) {
      wait();
    }
  }
  __device__ __forceinline__ void pass_at_start() const {
    if (kStartsApart && consumer_ < C::kConsumers - 1) {
      pass();
    }
  }

  // Before the first of the tiles in turns, n; before each one; and in a half of tile n, once the product behind which
  // its exponentials were waiting, O += P V of the half before, is over.
  __device__ __forceinline__ void begin(int n) const { pass_behind(Half<0>{}, n - 1); }
  __device__ __forceinline__ void wait_in(int n) const {
    if (is_due(n)) {
      wait();
    }
  }
  template <int kFirstKey>
  __device__ __forceinline__ void pass_behind(Half<kFirstKey> /*part*/, int n) const {
    constexpr bool kIsLower = kFirstKey == 0;
    if (is_due(kIsLower ? n + 1 : n) && (consumer_ == C::kConsumers - 1) == kIsLower) {
      pass();
    }
  }

 private:
  static constexpr bool kApplies = C::kCtasPerSm == 1;
  // Once: the first consumer may begin with far keys before the second has begun with near ones.
  static constexpr bool kStartsApart = kApplies && C::kPhase != Phase::far;
  static constexpr KeyLoad kLoad = C::KeyLoader::kLoad;
  static constexpr bool kHasTurns =
      kApplies && (kLoad == KeyLoad::tma || kLoad == KeyLoad::runs_tma) && (C::kColumns == 128 || C::kKeys == 256);
  static constexpr int kEvery = 512 / C::kKeys;
  static constexpr int kThreads = 2 * kWarpgroup;  // of two neighbours, the last consumer and the first among them
  static constexpr int kFirstBarrier = 2;          // a consumer's; FuseKeys has 1

  [[nodiscard]] __device__ static bool is_due(int n) { return kHasTurns && n % kEvery == 0; }
  __device__ void wait() const { ptx::named_barrier_sync(kFirstBarrier + consumer_, kThreads); }
  __device__ void pass() const {
    ptx::named_barrier_arrive(kFirstBarrier + (consumer_ == C::kConsumers - 1 ? 0 : consumer_ + 1), kThreads);
  }

  int consumer_;
};

// The tiles from `tile` on, of which there is one at least: products are issued before the exponentials of the half
// before theirs. The functions are consume()'s. before: the tile before, at the end the last one. caps: whether scores
// are capped, std::bool_constant.
template <class C, class Caps, class ScoreScale, class Output, class Exponentials>
__device__ __forceinline__ void consume_ahead(TileInRing<C> tile, TileInRing<C>& before, int tiles,
                                              const Stagger<C>& stagger, Caps caps, const ScoreScale& issue_scores,
                                              const Output& issue_output, const Exponentials& exponentials) {
  constexpr Half<C::kHalf> upper;
  constexpr Half<0> lower;
  stagger.begin(tile.n);
  issue_scores(upper, tile);
#pragma unroll 1
  while (tile.n < tiles - 1) {
    stagger.wait_in(tile.n);
    issue_output(lower, before);
    issue_scores(lower, tile);
    exponentials(caps, upper, tile, before, Pending<2>{});
    issue_output(upper, tile);
    const TileInRing<C> next = tile.next();
    issue_scores(upper, next);
    exponentials(caps, lower, tile, before, Pending<2>{});
    before = tile;
    tile = next;
  }
  stagger.wait_in(tile.n);
  issue_output(lower, before);
  issue_scores(lower, tile);
  exponentials(caps, upper, tile, before, Pending<2>{});
  issue_output(upper, tile);
  exponentials(caps, lower, tile, before, Pending<1>{});
  before = tile;
}

// The same, with a loop of their own for capped scores: caps are five times a loop's other instructions.
template <class C, class ScoreScale, class Output, class Exponentials>
__device__ __forceinline__ void consume_ahead(const TileInRing<C>& tile, TileInRing<C>& before, int tiles,
                                              const Stagger<C>& stagger, const ScoreCap& cap,
                                              const ScoreScale& issue_scores, const Output& issue_output,
                                              const Exponentials& exponentials) {
  if (C::kCapsScores && cap.cap != 0) {
    constexpr std::bool_constant<C::kCapsScores> caps;
    consume_ahead<C>(tile, before, tiles, stagger, caps, issue_scores, issue_output, exponentials);
  } else {
    consume_ahead<C>(tile, before, tiles, stagger, std::false_type{}, issue_scores, issue_output, exponentials);
  }
}

// The same where there are registers for one half's scores.
template <class C, class ScoreScale, class Output, class Exponentials, class Loads>
__device__ __forceinline__ void consume_behind(TileInRing<C> tile, TileInRing<C>& before, int tiles,
                                               const ScoreScale& issue_scores, const Output& issue_output,
                                               const Exponentials& exponentials, Loads& loads) {
  constexpr Half<C::kHalf> upper;
  constexpr Half<0> lower;
  constexpr std::false_type caps;
#pragma unroll 1
  while (tile.n < tiles) {
    issue_scores(upper, tile);
    issue_output(lower, before);
    exponentials(caps, upper, tile, before, Pending<0>{});
    issue_scores(lower, tile);
    issue_output(upper, tile);
    exponentials(caps, lower, tile, before, Pending<0>{});
    loads.after_tile(tile.n);
    before = tile;
    tile = tile.next();
  }
}

// Scores become P with an online row max, and O is rescaled, once no product is under way.
template <class C>
__device__ __forceinline__ void online_exponentials(RowMax row_max, Softmax<C>& softmax, float (&s)[C::kHalf / 2],
                                                    float (&o)[C::kValues / 2]) {
  float factor[2];
  const bool rescales = row_max < RowMax::known && softmax.update_row_max(s, factor);
  const bool subtracted = C::kScaleIn == ScaleIn::softmax && row_max == RowMax::online;
  if (subtracted) {
    softmax.subtract_row_max(s);
  }
  softmax.template exponentials<RowMax::online>(s, subtracted ? make_float2(0, 0) : softmax.shift());
  make_headroom<C>(s, row_max);
  ptx::wgmma_wait<0>();
  if (rescales) {
    rescale(o, factor);
  }
}

}  // namespace distr::cuda::sm90
