// SPDX-License-Identifier: Apache-2.0
// The consumer of exact attention that skips far halves of tiles (method, 8), 64 queries of it.
//
//   for the halves of the tiles of near keys, then of far ones, 64 keys each:
//     S of the next half = Q K^T       on the tensor cores during what follows
//     keep the half where one of its scores is above L + ln p, by a vote of the four warps
//     if it is kept: row max, P, O += P V
//
// L, the log-sum-exp of a row's near scores, is there when the first far tile is. A near half is kept where some row
// sees a key. The votes take maxima that the row max needs as well, so that is online in all tiles, and O is rescaled
// where it grows by 2^8. Three consumers hide each other's votes, exponentials and O += P V.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/consumer.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/voted_keys.cuh"

namespace distr::cuda::sm90 {

// What P is smaller by where it is multiplied by V, as in other kernels' repeated passes (kHeadroom). There is one pass
// here, so it is a compromise: sums of 2^20 values leave fp32's range where values are near its end, and values below
// 2^-115 lose digits.
template <class C>
inline constexpr float kVotedHeadroom = kHeadroom<C> == 1 ? 1.0F : 0x1p20F;

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

// A vote of a consumer's four warps on whether its 64 queries keep a half of a tile.
template <class C>
class Vote {
 public:
  __device__ __forceinline__ Vote(const Pass<C>& pass, int consumer)
      : problem_(pass.p.problem), barrier_(kFirstBarrier + consumer) {}

  // From the first far tile on: what a score has to be above.
  __device__ __forceinline__ void set_thresholds(const Softmax<C>& softmax) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(softmax.row_sum[half]) * kVotedHeadroom<C>;
      const float threshold = softmax.row_max[half] + (log2f(sum) + problem_.near.skip_log2) / softmax.scale;
      threshold_[half] = sum == 0.0F ? kLowest : fmaxf(threshold, kLowest);
    }
  }

  // largest: of this thread's two rows. NaN keeps.
  [[nodiscard]] __device__ __forceinline__ bool cast(const float (&largest)[2]) const {
    const bool keeps = !(ptx::max_nan(largest[0] - threshold_[0], largest[1] - threshold_[1]) <= 0.0F);
    return __any_sync(~0U, ptx::named_barrier_or(barrier_, kWarpgroup, keeps)) != 0;  // the compiler sees one answer
  }

 private:
  static constexpr int kFirstBarrier = 2;
  static constexpr float kLowest = -0x1.fffffep127F;  // above that of a row that sees no key, -inf

  const DeviceProblem& problem_;
  int barrier_;
  float threshold_[2] = {kLowest, kLowest};
};

// How many far halves 64 rows see, of which the first is `row`.
[[nodiscard]] __device__ inline int count_far_halves(const ForwardParameters& p, std::int64_t row) {
  const NearTiles tiles = near_tiles(p.problem, row, p.problem.seq_k);
  const std::int64_t seen = visible_keys(p.problem, min(row + common::kSkipRows, p.row_end) - 1);
  const std::int64_t first_key = first_visible_key(p.problem, row);
  if (first_key >= seen) {
    return 0;
  }
  const auto first = static_cast<int>(first_key / common::kSkipKeys);
  const auto end = static_cast<int>((seen + common::kSkipKeys - 1) / common::kSkipKeys);
  const auto near = [&](int from, int to) { return max(min(2 * to, end) - max(2 * from, first), 0); };
  return end - first - near(tiles.begin, tiles.sinks) - near(tiles.first, tiles.last);
}

// Hides what a row does not see of half a tile, and all of it from rows that do not exist.
template <class C>
__device__ __forceinline__ void hide_keys(float (&s)[C::kHalf / 2], const ForwardParameters& p, int row,
                                          int first_key) {
  apply_mask<C::kHalf>(s, 0, p.problem, row, first_key);
#pragma unroll
  for (int i = 0; i < C::kHalf / 2; ++i) {
    s[i] = row + i / 2 % 2 * 8 < p.row_end ? s[i] : -INFINITY;
  }
}

// A stage of both rings. Its barriers are at constant distances from the first of them: computed anew, they have no
// registers of their own.
template <class C>
class VotedStage {
  using Barriers = typename SharedStorage<C>::Barriers;

 public:
  __device__ __forceinline__ explicit VotedStage(const Shared<C>& shared,
                                                 PipelineState<C::kStages> state = PipelineState<C::kStages>(0))
      : state_(state), barriers_(ptx::opaque(shared.keys_full(state.stage))) {}

  [[nodiscard]] __device__ __forceinline__ VotedStage next(const Shared<C>& shared) const {
    PipelineState<C::kStages> state = state_;
    state.advance();
    return VotedStage(shared, state);
  }
  [[nodiscard]] __device__ int index() const { return state_.stage; }
  __device__ __forceinline__ void wait_for_keys() const { ptx::barrier_wait(barriers_, state_.phase); }
  __device__ __forceinline__ void wait_for_values() const {
    ptx::barrier_wait(at(offsetof(Barriers, values_full)), state_.phase);
  }
  __device__ __forceinline__ void free_keys() const { arrive_warp(at(offsetof(Barriers, keys_empty))); }
  __device__ __forceinline__ void free_values() const { arrive_warp(at(offsetof(Barriers, values_empty))); }

 private:
  [[nodiscard]] __device__ std::uint32_t at(std::size_t offset) const {
    return barriers_ + static_cast<std::uint32_t>(offset - offsetof(Barriers, keys_full));
  }

  PipelineState<C::kStages> state_;
  std::uint32_t barriers_;
};

// A consumer's queries, which have a tile at least. row: the thread's first. Returns how many halves they keep, of far
// keys where there are any.
template <class C>
__device__ __forceinline__ int attend_voted(const Pass<C>& pass, int consumer, int row, float (&o)[C::kValues / 2],
                                            Softmax<C>& softmax) {
  using Scores = float[C::kHalf / 2];
  constexpr Half<C::kHalf> upper;
  constexpr Half<0> lower;
  static_assert(C::kKeys == common::kNearTile && C::kHalf == common::kSkipKeys);
  static_assert(C::kStages >= 2);  // values are freed behind the next tile's keys
  constexpr float kHeadroomLog2 = kVotedHeadroom<C> == 1 ? 0.0F : 20.0F;
  const Shared<C>& shared = pass.shared;
  Vote<C> vote(pass, consumer);
  Scores of_lower;
  Scores of_upper;
  int kept = 0;
  ptx::barrier_wait(shared.queries_full(), 0);
  const Queries<C> queries(shared.queries(consumer), 0);

  const auto issue_scores = [&](Scores& s, const VotedStage<C>& stage, auto part) {
    ptx::wgmma_fence();
    issue_scores_product<C>(s, queries, shared.keys(stage.index()), part);
  };
  const auto raise_row_max = [&](const float(&largest)[2]) {
    if (__any_sync(~0U, softmax.is_above(largest[0], 0) || softmax.is_above(largest[1], 1))) {
      const float of_rows[2] = {quad_max(largest[0]), quad_max(largest[1])};
      float factor[2];
      softmax.raise_row_max(of_rows, factor);
      rescale(o, factor);
    }
  };
  // Half a tile whose scores are there.
  const auto attend = [&](Scores& s, const VotedTile& tile, const VotedStage<C>& stage, auto part) {
    if (!tile.is_plain()) {
      if (part == lower && tile.is_first_far()) {
        vote.set_thresholds(softmax);
        kept = 0;
      }
      if (!tile.is_taken_by(consumer)) {
        return;
      }
      if (tile.has_mask()) {
        hide_keys<C>(s, pass.p, row, tile.first_key() + part);
      }
    }
    float largest[2];
    largest_of(s, largest);
    if (!vote.cast(largest)) {
      return;
    }
    ++kept;
    std::uint32_t probabilities[C::kHalf / 16][4];
    raise_row_max(largest);
    softmax.subtract_row_max(s);
    softmax.template exponentials<RowMax::online>(s, make_float2(kHeadroomLog2, kHeadroomLog2));
    pack<C>(s, probabilities);
    C::Stages::values([&] { stage.wait_for_values(); });
    ptx::wgmma_fence();
    issue_output_product<C>(o, probabilities, shared.values(stage.index()), part);
    ptx::wgmma_wait<0>();  // the compiler lets no product be under way where a branch ends that goes round it
  };
  // Read by the lane that frees the stage's keys, behind which the producer writes the next tile's.
  const auto tile_in = [&](const VotedStage<C>& stage) {
    return VotedTile(uniform(threadIdx.x % 32 == 0 ? shared.storage.loader.tiles[stage.index()] : 0));
  };

  VotedStage<C> stage(shared);
  stage.wait_for_keys();
  issue_scores(of_lower, stage, lower);
#pragma unroll 1
  for (int n = 1; n <= pass.tiles; ++n) {
    const bool is_last = n == pass.tiles;
    const VotedTile tile = tile_in(stage);
    issue_scores(of_upper, stage, upper);
    ptx::wgmma_wait<1>();
    ptx::warpgroup_fence_operand(of_lower);
    attend(of_lower, tile, stage, lower);
    // Behind the last tile its own scores once more, which nobody reads: one loop for all is shorter.
    const VotedStage<C> next = is_last ? stage : stage.next(shared);
    next.wait_for_keys();
    issue_scores(of_lower, next, lower);
    ptx::wgmma_wait<1>();
    ptx::warpgroup_fence_operand(of_upper);
    stage.free_keys();
    attend(of_upper, tile, stage, upper);
    if (!is_last) {  // else a consumer that skips might free them before others have freed the stage's values before
      stage.free_values();
    }
    stage = next;
  }
  ptx::wgmma_wait<0>();
  ptx::warpgroup_fence_operand(of_lower);  // its registers are others' from here on
  return kept;
}

// All that a consumer does.
template <class C>
__device__ __forceinline__ void consume_voted(const Pass<C>& pass) {
  const ForwardParameters& p = pass.p;
  const int consumer = uniform(static_cast<int>(threadIdx.x) / kWarpgroup) - C::kFirstConsumer;
  const int first_row = pass.work.row + consumer * 64;
  const int row =
      first_row + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  float o[C::kValues / 2];
#pragma unroll
  for (float& x : o) {
    x = ptx::opaque(0.0F);
  }
  Softmax<C> softmax(p.problem.scale_log2);
  int kept = 0;
  if (pass.tiles > 0) {
    kept = attend_voted<C>(pass, consumer, row, o, softmax);
  }
  softmax.row_sum[0] *= kVotedHeadroom<C>;
  softmax.row_sum[1] *= kVotedHeadroom<C>;
  store<C>(pass, row, kAllRows, o, softmax, kVotedHeadroom<C>);
  if (p.listed.halves != nullptr && first_row < p.row_end && threadIdx.x % kWarpgroup == 0) {
    std::int32_t* const to = p.listed.halves + 2 * skip_group(p.problem, pass.work, consumer);
    to[0] = pass.tiles > pass.shared.storage.loader.block.count_near() ? kept : 0;
    to[1] = count_far_halves(p, first_row);
  }
}

}  // namespace distr::cuda::sm90
