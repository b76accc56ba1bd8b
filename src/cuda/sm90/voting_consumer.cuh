// SPDX-License-Identifier: Apache-2.0
// The consumer of attention that skips far halves of tiles (method, 8), 64 queries of it.
//
//   for the halves of the tiles of near keys, then of far ones, 64 keys each:
//     S = Q K^T, or of far keys where groups estimate them: S = Q~ K^T or q_hat k_hat^T, the score without a constant
//     c of the row
//     keep the half where one of its scores is above L + ln p, by a vote of the four warps (vote.cuh)
//     if it is kept: with finish S = Q K^T; row max, P, O += P V
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
#include "cuda/sm90/near_result.cuh"
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

// C, as products of near keys see it.
template <class C>
struct OfNearKeys : C {
  static constexpr int kColumns = C::kNearColumns;
  using QueryTile = typename C::NearQueryTile;
  using KeyTile = typename C::NearKeyTile;
};

// A tile's stage of both rings.
template <class C>
class VotedStage {
  using Barriers = typename SharedStorage<C>::Barriers;
  using State = PipelineState<C::kStages>;

 public:
  __device__ __forceinline__ explicit VotedStage(const Shared<C>& shared, State state = State(0))
      : state_(state), keys_full_(ptx::opaque(shared.keys_full(state.stage))) {}

  [[nodiscard]] __device__ __forceinline__ VotedStage next(const Shared<C>& shared) const {
    State state = state_;
    state.advance();
    return VotedStage(shared, state);
  }
  [[nodiscard]] __device__ int number() const { return state_.stage; }
  __device__ __forceinline__ void wait_for_keys() const { ptx::barrier_wait(keys_full_, state_.phase); }
  __device__ __forceinline__ void wait_for_values() const {
    ptx::barrier_wait(barrier(offsetof(Barriers, values_full)), state_.phase);
  }
  __device__ __forceinline__ void free_keys() const { arrive_warp(barrier(offsetof(Barriers, keys_empty))); }
  __device__ __forceinline__ void free_values() const { arrive_warp(barrier(offsetof(Barriers, values_empty))); }

 private:
  // At constant distances from the first: computed anew, they have no registers of their own.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t barrier(std::size_t offset) const {
    return keys_full_ + static_cast<std::uint32_t>(offset - offsetof(Barriers, keys_full));
  }

  State state_;
  std::uint32_t keys_full_;
};

// A consumer's queries, which have a tile at least. Row: a function that gives the thread's first.
template <class C, class Row>
class VotingConsumer {
  using Stage = VotedStage<C>;
  using HalfScores = float[C::kHalf / 2];

 public:
  __device__ __forceinline__ VotingConsumer(const Pass<C>& pass, int consumer, const Row& row,
                                            float (&o)[C::kValues / 2], VotedSoftmax<C>& softmax)
      : pass_(pass),
        consumer_(consumer),
        row_(row),
        o_(o),
        softmax_(softmax),
        vote_(pass.shared, consumer),
        finishes_(C::kHasFarQueries && !C::kFarIsNarrower && pass.p.problem.near.finishes) {}

  // Returns how many halves are kept, of far keys where there are any.
  __device__ __forceinline__ int attend() {
    ptx::barrier_wait(pass_.shared.queries_full(), 0);
    if constexpr (C::kHasFarQueries) {
      C::KeyLoader::wait_for_far_queries(pass_.shared);
    }
    Stage stage(pass_.shared);
    stage.wait_for_keys();
    if constexpr (C::kFarIsNarrower) {
      attend_near(stage);
      if (pass_.keys.near < pass_.tiles) {
        attend(stage, pass_.keys.near);
      }
    } else {
      attend(stage, 0);
    }
    return kept_;
  }

 private:
  static constexpr Half<C::kHalf> kUpper{};
  static constexpr Half<0> kLower{};
  static constexpr bool kIsWhole = C::kScoreBuffers == 2;  // whether S of both halves is one product
  static_assert(C::kKeys == common::kNearTile && C::kHalf == common::kSkipKeys);

  // Near tiles, where far ones have another product: the compiler lets no product be under way where branches join.
  // They are few, and what a consumer waits for is hidden by the others. The next tile's keys are there at the end.
  __device__ __forceinline__ void attend_near(Stage& stage) {
    static_assert(kIsWhole);
#pragma unroll 1
    for (int n = 0; n < pass_.keys.near; ++n) {
      const VotedTile tile = tile_in(n, stage);
      ptx::wgmma_fence();
      issue_product<OfNearKeys<C>>(stage, consumer_, s_, kLower);
      wait_for_scores();
      stage.free_keys();
      attend_whole(n, tile, stage);
      if (n < pass_.tiles - 1) {
        const Stage next = stage.next(pass_.shared);
        next.wait_for_keys();
        stage.free_values();
        stage = next;
      }
    }
  }
  // Tiles from the first-th on, whose keys are there.
  __device__ __forceinline__ void attend(Stage stage, int first) {
    issue_scores(stage, is_far(first), s_, kLower);
#pragma unroll 1
    for (int n = first; n < pass_.tiles; ++n) {
      const bool is_last = n == pass_.tiles - 1;
      const bool holds_keys = finishes_ && is_far(n);
      const VotedTile tile = tile_in(n, stage);
      // Behind the last tile its own scores once more, which nobody reads: one loop for all is shorter.
      const Stage next = is_last ? stage : stage.next(pass_.shared);
      wait_for_scores();
      if constexpr (kIsWhole) {
        free_keys_if(!holds_keys, stage);
        attend_whole(n, tile, stage);
        free_keys_if(holds_keys, stage);
        next.wait_for_keys();
      } else {
        attend_half(n, tile, stage, kLower);
        issue_scores(stage, is_far(n), s_, kUpper);
        next.wait_for_keys();
        wait_for_scores();
        free_keys_if(!holds_keys, stage);
        attend_half(n, tile, stage, kUpper);
        free_keys_if(holds_keys, stage);
      }
      issue_scores(next, is_far(n + 1), s_, kLower);
      if (!is_last) {  // else a consumer that skips might free them before others have freed the stage's values before
        stage.free_values();
      }
      stage = next;
    }
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(s_);  // its registers are others' from here on
  }

  [[nodiscard]] __device__ __forceinline__ bool is_far(int n) const { return n >= pass_.keys.near; }
  template <class Part>
  [[nodiscard]] __device__ __forceinline__ HalfScores& scores_of(Part part) {
    return reinterpret_cast<HalfScores&>(s_[kIsWhole ? part / 2 : 0]);
  }
  // From that half on, by Q or by what far keys have, which lies behind it.
  template <int kSums, class Part>
  __device__ __forceinline__ void issue_scores(const Stage& stage, bool is_far, float (&scores)[kSums], Part part) {
    const bool lies_behind = C::kFarIsNarrower || (C::kHasFarQueries && is_far);
    ptx::wgmma_fence();
    issue_product<C>(stage, consumer_ + (lies_behind ? C::kConsumers : 0), scores, part);
  }
  template <class Of, int kSums, class Part>
  __device__ __forceinline__ void issue_product(const Stage& stage, int queries, float (&scores)[kSums], Part part) {
    issue_scores_product<Of>(scores, Queries<Of>(pass_.shared.queries(queries), 0), pass_.shared.keys(stage.number()),
                             part);
  }
  __device__ __forceinline__ void wait_for_scores() {
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(s_);
  }
  __device__ __forceinline__ static void free_keys_if(bool now, const Stage& stage) {
    if (now) {
      stage.free_keys();
    }
  }
  // What is known of tile n, if it is special. Read by the lane that frees the stage's keys, behind which the producer
  // writes the next tile's.
  [[nodiscard]] __device__ __forceinline__ VotedTile tile_in(int n, const Stage& stage) const {
    const auto read = [&] { return threadIdx.x % 32 == 0 ? pass_.shared.storage.loader.tiles[stage.number()] : 0; };
    return VotedTile(n < pass_.keys.special ? uniform(read()) : 0);
  }

  // Before the first far tile. Far scores lack c, so the softmax's scores do from here on; or, where only votes are
  // cast on estimates, the thresholds.
  __device__ __forceinline__ void begin_far() {
    float lacking[2] = {};
    if constexpr (C::kHasFarQueries) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float dropped = dropped_of(pass_.p, pass_.work, row_() + r * 8);
        if (finishes_) {
          lacking[r] = dropped;
        } else {
          softmax_.shift_scores(r, -dropped);
        }
      }
    }
    vote_.set_thresholds(softmax_, pass_.p.problem.near.skip_log2, lacking);
    kept_ = 0;
  }
  // What the rows do not see of halves.
  template <class... Parts>
  __device__ __forceinline__ void hide(int n, const VotedTile& tile, Parts... parts) {
    if (n < pass_.keys.special && tile.has_mask()) {
      (hide_keys<C>(scores_of(parts), pass_.p, row_(), tile.first_key() + parts), ...);
    }
  }
  // Whether the consumer takes halves of tile n whose scores are there.
  template <class... Parts>
  [[nodiscard]] __device__ __forceinline__ bool takes(int n, const VotedTile& tile, Parts... parts) {
    if (n >= pass_.keys.special) {
      return true;
    }
    if (((parts == kLower) || ...) && n == pass_.keys.near) {
      begin_far();
    }
    if (!tile.is_taken_by(consumer_)) {
      return false;
    }
    hide(n, tile, parts...);
    return true;
  }

  // Exact scores of one half or both, in the place of their estimates, and the largest of them.
  template <int kSums, class First, class... Others>
  __device__ __forceinline__ void finish(int n, const VotedTile& tile, const Stage& stage, float (&scores)[kSums],
                                         float (&largest)[2], First first, Others... others) {
    issue_scores(stage, false, scores, first);
    wait_for_scores();
    hide(n, tile, first, others...);
    largest_of(scores, largest);
  }
  // P of a half, and O += P V.
  template <class Part>
  __device__ __forceinline__ void add(const Stage& stage, std::uint32_t (&probabilities)[C::kHalf / 16][4], Part part) {
    softmax_.exponentials(scores_of(part));
    pack<C>(scores_of(part), probabilities);
    C::Stages::values([&] { stage.wait_for_values(); });
    ptx::wgmma_fence();
    issue_output_product<C>(o_, probabilities, pass_.shared.values(stage.number()), part);
  }
  // A half that is kept, or both, of which `largest` are the largest scores. P of the upper one is made while O += P V
  // of the lower one is under way. scores: of all of them.
  template <int kSums, class... Parts>
  __device__ __forceinline__ void keep(int n, const VotedTile& tile, const Stage& stage, float (&scores)[kSums],
                                       float (&largest)[2], Parts... parts) {
    if (finishes_ && is_far(n)) {
      finish(n, tile, stage, scores, largest, parts...);
    }
    kept_ += static_cast<int>(sizeof...(parts));
    raise_references<C>(largest, o_, softmax_);
    std::uint32_t probabilities[C::kScoreBuffers][C::kHalf / 16][4];
    (add(stage, probabilities[kIsWhole ? parts / C::kHalf : 0], parts), ...);
    ptx::wgmma_wait<0>();  // the compiler lets no product be under way where a branch ends that goes round it
  }
  template <class Part>
  __device__ __forceinline__ void attend_half(int n, const VotedTile& tile, const Stage& stage, Part part) {
    float largest[2];
    if (takes(n, tile, part) && vote_.cast(scores_of(part), largest)) {
      keep(n, tile, stage, scores_of(part), largest, part);
    }
  }
  __device__ __forceinline__ void attend_whole(int n, const VotedTile& tile, const Stage& stage) {
    if (!takes(n, tile, kLower, kUpper)) {
      return;
    }
    float largest[2][2];
    const KeptHalves halves = vote_.cast(scores_of(kLower), scores_of(kUpper), largest[0], largest[1]);
    if (halves.lower && halves.upper) {
      float of_both[2] = {ptx::max_nan(largest[0][0], largest[1][0]), ptx::max_nan(largest[0][1], largest[1][1])};
      keep(n, tile, stage, s_, of_both, kLower, kUpper);
    } else if (halves.lower) {
      keep(n, tile, stage, scores_of(kLower), largest[0], kLower);
    } else if (halves.upper) {
      keep(n, tile, stage, scores_of(kUpper), largest[1], kUpper);
    }
  }

  const Pass<C>& pass_;
  const int consumer_;
  const Row& row_;
  float (&o_)[C::kValues / 2];
  VotedSoftmax<C>& softmax_;
  Vote<C> vote_;
  const bool finishes_;
  float s_[C::kScoreBuffers * C::kHalf / 2];
  int kept_ = 0;
};

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
    kept = VotingConsumer<C, decltype(row)>(pass, consumer, row, o, softmax).attend();
  }
  if (C::kHasFarQueries && pass.tiles > pass.keys.near && !p.problem.near.finishes) {
    softmax.shift_scores(0, dropped_of(p, pass.work, row()));
    softmax.shift_scores(1, dropped_of(p, pass.work, row() + 8));
  }
  store<C>(pass, row(), kAllRows, o, softmax.result(), VotedSoftmax<C>::kHeadroom);
  if (p.listed.halves != nullptr && first_row() < p.row_end && threadIdx.x % kWarpgroup == 0) {
    std::int32_t* const to = p.listed.halves + 2 * skip_group(p.problem, pass.work, consumer);
    to[0] = pass.tiles > pass.keys.near ? kept : 0;
    to[1] = count_far_halves(p, first_row());
  }
}

}  // namespace distr::cuda::sm90
