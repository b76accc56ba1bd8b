// SPDX-License-Identifier: Apache-2.0
// The consumer of exact attention that skips far halves of tiles (method, 8), 64 queries of it.
//
//   for the halves of the tiles of near keys, then of far ones, 64 keys each:
//     S = Q K^T
//     keep the half where one of its scores is above L + ln p, by a vote of the four warps (vote.cuh)
//     if it is kept: row max, P, O += P V
//
// The votes take maxima that the row max needs as well, so that is online in all tiles. What a consumer waits for, S,
// its vote and O += P V, is hidden by the others, three in a block or four in two blocks that share an SM. Three have
// registers for a whole tile's scores: its S is one product, which reads Q once, and its halves have one vote.
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
#include "cuda/sm90/vote.cuh"
#include "cuda/sm90/voted_keys.cuh"
#include "cuda/sm90/voted_softmax.cuh"

namespace distr::cuda::sm90 {

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

// Before P of scores of which these are the thread's largest, of its two rows.
template <class C>
__device__ __forceinline__ void raise_references(const float (&largest)[2], float (&o)[C::kValues / 2],
                                                 VotedSoftmax<C>& softmax) {
  if (__any_sync(~0U, softmax.is_exceeded_by(largest))) {
    const float of_rows[2] = {quad_max(largest[0]), quad_max(largest[1])};
    float factor[2];
    softmax.raise(of_rows, factor);
    rescale(o, factor);
  }
}

// A tile's stage of both rings, which are one where they have as many stages.
template <class C>
class VotedStage {
  using Barriers = typename SharedStorage<C>::Barriers;
  using OfKeys = PipelineState<C::kStages>;
  using OfValues = PipelineState<C::kValueStages>;

 public:
  __device__ __forceinline__ explicit VotedStage(const Shared<C>& shared, OfKeys keys = OfKeys(0),
                                                 OfValues values = OfValues(0))
      : keys_(keys),
        values_(values),
        keys_full_(ptx::opaque(shared.keys_full(keys.stage))),
        values_full_(kIsOneRing ? 0 : ptx::opaque(shared.values_full(values.stage))) {}

  [[nodiscard]] __device__ __forceinline__ VotedStage next(const Shared<C>& shared) const {
    OfKeys keys = keys_;
    OfValues values = values_;
    keys.advance();
    values.advance();
    return VotedStage(shared, keys, values);
  }
  [[nodiscard]] __device__ int of_keys() const { return keys_.stage; }
  [[nodiscard]] __device__ int of_values() const { return kIsOneRing ? keys_.stage : values_.stage; }
  __device__ __forceinline__ void wait_for_keys() const { ptx::barrier_wait(keys_full_, keys_.phase); }
  __device__ __forceinline__ void wait_for_values() const {
    ptx::barrier_wait(values_full(), kIsOneRing ? keys_.phase : values_.phase);
  }
  __device__ __forceinline__ void free_keys() const {
    arrive_warp(keys_full_ + distance(offsetof(Barriers, keys_full), offsetof(Barriers, keys_empty)));
  }
  __device__ __forceinline__ void free_values() const {
    arrive_warp(values_full() + distance(offsetof(Barriers, values_full), offsetof(Barriers, values_empty)));
  }

 private:
  static constexpr bool kIsOneRing = C::kStages == C::kValueStages;

  [[nodiscard]] __device__ static constexpr std::uint32_t distance(std::size_t from, std::size_t to) {
    return static_cast<std::uint32_t>(to - from);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t values_full() const {
    return kIsOneRing ? keys_full_ + distance(offsetof(Barriers, keys_full), offsetof(Barriers, values_full))
                      : values_full_;
  }

  OfKeys keys_;
  OfValues values_;
  // Barriers. Others are at constant distances from these: computed anew, they have no registers of their own.
  std::uint32_t keys_full_, values_full_;
};

// A consumer's queries, which have a tile at least. row(): the thread's first. Returns how many halves they keep, of
// far keys where there are any.
template <class C, class Row>
__device__ __forceinline__ int attend_voted(const Pass<C>& pass, int consumer, const Row& row,
                                            float (&o)[C::kValues / 2], VotedSoftmax<C>& softmax) {
  constexpr Half<C::kHalf> upper;
  constexpr Half<0> lower;
  constexpr bool kIsWhole = C::kScoreBuffers == 2;  // whether S of both halves is one product
  static_assert(C::kKeys == common::kNearTile && C::kHalf == common::kSkipKeys);
  const Shared<C>& shared = pass.shared;
  Vote<C> vote(shared, consumer);
  float s[C::kScoreBuffers * C::kHalf / 2];
  int kept = 0;
  ptx::barrier_wait(shared.queries_full(), 0);
  const Queries<C> queries(shared.queries(consumer), 0);

  const auto scores_of = [&](auto part) -> auto& {
    return reinterpret_cast<float(&)[C::kHalf / 2]>(s[kIsWhole ? part / 2 : 0]);
  };
  // From that half on.
  const auto issue_scores = [&](const VotedStage<C>& stage, auto part) {
    ptx::wgmma_fence();
    issue_scores_product<C>(s, queries, shared.keys(stage.of_keys()), part);
  };
  const auto wait_for_scores = [&] {
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(s);
  };
  // What is known of tile n, if it is special. Read by the lane that frees the stage's keys, behind which the producer
  // writes the next tile's.
  const auto tile_in = [&](int n, const VotedStage<C>& stage) {
    const auto read = [&] { return threadIdx.x % 32 == 0 ? shared.storage.loader.tiles[stage.of_keys()] : 0; };
    return VotedTile(n < pass.keys.special ? uniform(read()) : 0);
  };
  // Whether the consumer takes halves of tile n whose scores are there. What its rows do not see is hidden.
  const auto takes = [&](int n, const VotedTile& tile, auto... parts) {
    if (n >= pass.keys.special) {
      return true;
    }
    if (((parts == lower) || ...) && n == pass.keys.near) {
      vote.set_thresholds(softmax, pass.p.problem.near.skip_log2);
      kept = 0;
    }
    if (!tile.is_taken_by(consumer)) {
      return false;
    }
    if (tile.has_mask()) {
      (hide_keys<C>(scores_of(parts), pass.p, row(), tile.first_key() + parts), ...);
    }
    return true;
  };
  // Halves that are kept, of which largest are the largest scores. P of the upper one is made while O += P V of the
  // lower one is under way.
  const auto keep = [&](const VotedStage<C>& stage, const float(&largest)[2], auto... parts) {
    kept += static_cast<int>(sizeof...(parts));
    raise_references<C>(largest, o, softmax);
    std::uint32_t probabilities[C::kScoreBuffers][C::kHalf / 16][4];
    const auto add = [&](auto part) {
      auto& of_part = probabilities[kIsWhole ? part / C::kHalf : 0];
      softmax.exponentials(scores_of(part));
      pack<C>(scores_of(part), of_part);
      C::Stages::values([&] { stage.wait_for_values(); });
      ptx::wgmma_fence();
      issue_output_product<C>(o, of_part, shared.values(stage.of_values()), part);
    };
    (add(parts), ...);
    ptx::wgmma_wait<0>();  // the compiler lets no product be under way where a branch ends that goes round it
  };
  const auto attend = [&](int n, const VotedTile& tile, const VotedStage<C>& stage, auto part) {
    float largest[2];
    if (takes(n, tile, part) && vote.cast(scores_of(part), largest)) {
      keep(stage, largest, part);
    }
  };
  const auto attend_whole = [&](int n, const VotedTile& tile, const VotedStage<C>& stage) {
    if (!takes(n, tile, lower, upper)) {
      return;
    }
    float largest[2][2];
    const KeptHalves halves = vote.cast(scores_of(lower), scores_of(upper), largest[0], largest[1]);
    if (halves.lower && halves.upper) {
      keep(stage, {ptx::max_nan(largest[0][0], largest[1][0]), ptx::max_nan(largest[0][1], largest[1][1])}, lower,
           upper);
    } else if (halves.lower) {
      keep(stage, largest[0], lower);
    } else if (halves.upper) {
      keep(stage, largest[1], upper);
    }
  };

  VotedStage<C> stage(shared);
  stage.wait_for_keys();
  issue_scores(stage, lower);
#pragma unroll 1
  for (int n = 0; n < pass.tiles; ++n) {
    const bool is_last = n == pass.tiles - 1;
    const VotedTile tile = tile_in(n, stage);
    // Behind the last tile its own scores once more, which nobody reads: one loop for all is shorter.
    const VotedStage<C> next = is_last ? stage : stage.next(shared);
    wait_for_scores();
    if constexpr (kIsWhole) {
      stage.free_keys();
      attend_whole(n, tile, stage);
      next.wait_for_keys();
    } else {
      attend(n, tile, stage, lower);
      issue_scores(stage, upper);
      next.wait_for_keys();
      wait_for_scores();
      stage.free_keys();
      attend(n, tile, stage, upper);
    }
    issue_scores(next, lower);
    if (!is_last) {  // else a consumer that skips might free them before others have freed the stage's values before
      stage.free_values();
    }
    stage = next;
  }
  ptx::wgmma_wait<0>();
  ptx::warpgroup_fence_operand(s);  // its registers are others' from here on
  return kept;
}

// All that a consumer does.
template <class C>
__device__ __forceinline__ void consume_voted(const Pass<C>& pass) {
  static_assert(C::kStages >= 2);  // the next tile's keys are waited for before a tile's values are freed, or its keys
  const ForwardParameters& p = pass.p;
  const int consumer = uniform(static_cast<int>(threadIdx.x) / kWarpgroup) - C::kFirstConsumer;
  // Computed where they are wanted, as there are no registers for them.
  const auto first_row = [&] { return pass.work.row + consumer * 64; };
  const auto row = [&] {
    return first_row() + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  };
  float o[C::kValues / 2];
#pragma unroll
  for (float& x : o) {
    x = ptx::opaque(0.0F);
  }
  VotedSoftmax<C> softmax(p.problem.scale_log2);
  int kept = 0;
  if (pass.tiles > 0) {
    kept = attend_voted<C>(pass, consumer, row, o, softmax);
  }
  store<C>(pass, row(), kAllRows, o, softmax.result(), VotedSoftmax<C>::kHeadroom);
  if (p.listed.halves != nullptr && first_row() < p.row_end && threadIdx.x % kWarpgroup == 0) {
    std::int32_t* const to = p.listed.halves + 2 * skip_group(p.problem, pass.work, consumer);
    to[0] = pass.tiles > pass.keys.near ? kept : 0;
    to[1] = count_far_halves(p, first_row());
  }
}

}  // namespace distr::cuda::sm90
