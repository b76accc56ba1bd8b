// SPDX-License-Identifier: Apache-2.0
// A consumer's 64 queries in one pass where keys are near or far (method, 8).
//
//   near tiles, then far tiles with a mask:   S, online row max, P, O += P V, half a tile after the other
//   the threshold of each row, from the near ones
//   far halves j, whose S_j was issued a half earlier:
//     O += P V of the half before, if it was kept, and S_(j+1)     both issued, on the tensor cores
//     vote: does one of the 64 rows have a score above its threshold?
//     if so P_j, by the row max of the near tiles, while these products still run
//
//   Scores are counted without what far ones keep of dropped columns, a constant of the row (`dropped`): it is
//   subtracted from near scores, and added to LSE. With `finish` near scores and LSE have none of it, and a kept half
//   gets the product of all columns.
#pragma once

#include <type_traits>

#include "cuda/ptx.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/consumer.cuh"
#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/near_rows.cuh"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/softmax.cuh"

namespace distr::cuda::sm90 {

// Issues part of S = Q K^T for half a tile: of the columns of one piece.
template <class C>
__device__ __forceinline__ void issue_near_product(float (&s)[C::kHalf / 2], std::uint32_t queries, std::uint32_t tile,
                                                   int first, int piece) {
  const SharedOperand<typename C::NearQueryTile> rows(queries);
  const SharedOperand<typename C::KeyTile> keys(tile);
#pragma unroll
  for (int step = 0; step < C::kColumns / 16; ++step) {
    const std::uint64_t left = rows.k_major(0, piece * (C::kColumns / 16) + step);
    const bool adds = piece > 0 || step > 0;
    if constexpr (C::KeyLoader::kTransposed) {
      ptx::wgmma<ptx::Major::k, ptx::Major::mn>(s, left, keys.mn_major(step * 16, first), adds, typename C::Element{});
    } else {
      ptx::wgmma<ptx::Major::k, ptx::Major::k>(s, left, keys.k_major(first, step), adds, typename C::Element{});
    }
  }
}

// See consume() in forward.cuh. The parts of a tile are its halves, and the scores of both have registers.
template <class C>
class NearConsumer {
 public:
  // row: the thread's first.
  __device__ __forceinline__ NearConsumer(const Pass<C>& pass, int consumer, int row, float (&o)[C::kValues / 2],
                                          Softmax<C>& softmax, NearRow& near_row)
      : pass_(pass),
        consumer_(consumer),
        row_(row),
        near_(pass.near()),
        whole_(whole_tiles<C>(pass.p.problem, pass.work.row)),
        skips_(pass.p.problem.near.skips),
        finishes_(pass.p.problem.near.finishes),
        near_queries_(pass.shared.near_queries(consumer)),
        queries_(pass.shared.queries(consumer), 0),
        o_(o),
        softmax_(softmax),
        near_row_(near_row) {}

  __device__ __forceinline__ unsigned consume(RowMax row_max) {
    const int tiles = pass_.tiles;
    online_scores(0);
    attend_online(0);
    int n = 1;
#pragma unroll 1
    for (; n < near_; ++n) {
      attend_next_online(n);
    }
    if (skips_ && near_ > 0) {
      set_thresholds<C>(near_row_, softmax_, pass_.p.problem.near);
    }
#pragma unroll 1
    for (; n < tiles && (row_max == RowMax::online || pass_.tile(n) >= whole_); ++n) {
      attend_next_online(n);
    }
    const bool all_online = n == tiles;
    // Far tiles without a mask, by the row max as it is now. P of the half before waits for its product with V.
    bool waits = true;
    if (skips_) {
      waits = attend_kept(n);
    } else if (n < tiles) {
      attend_all(n);
    }
    if (waits) {
      wait_values(tiles - 1);
      issue_output(kLower, tiles - 1);
    }
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(o_);
    wait_and_free_values(tiles - 1);
    return row_max == RowMax::online ? kAllRows : rows_in_range<C>(o_, softmax_, all_online);
  }

 private:
  static constexpr Half<C::kHalf> kUpper{};
  static constexpr Half<0> kLower{};

  template <class Part>
  [[nodiscard]] __device__ __forceinline__ auto& scores_of(Part part) {
    return s_[part == kUpper ? 0 : 1];
  }
  __device__ __forceinline__ void free_keys(int n) const {
    arrive_warp(pass_.shared.keys_empty(pass_.key_state(n).stage));
  }
  __device__ __forceinline__ void wait_values(int n) const {
    const auto state = pass_.state(n);
    ptx::barrier_wait(pass_.shared.values_full(state.stage), state.phase);
  }
  // They have been waited for: else they may still be on their way.
  __device__ __forceinline__ void free_values(int n) const {
    arrive_warp(pass_.shared.values_empty(pass_.state(n).stage));
  }
  // Else. All threads of the warp have seen them before one frees them: a later one would wait for the stage's next
  // use.
  __device__ __forceinline__ void wait_and_free_values(int n) const {
    wait_values(n);
    __syncwarp();
    free_values(n);
  }
  // part: where the half begins in its tile, in keys. The upper half is the first of its tile.
  __device__ __forceinline__ void issue_scores(float (&scores)[C::kHalf / 2], int part, int n) const {
    const auto state = pass_.key_state(n);
    if (part == kUpper) {
      ptx::barrier_wait(pass_.shared.keys_full(state.stage), state.phase);
    }
    ptx::wgmma_fence();
    issue_scores_product<C>(scores, queries_, pass_.shared.keys(state.stage), part);
  }
  __device__ __forceinline__ void issue_output(int part, int n) {
    if (part == kUpper) {
      wait_values(n);
    }
    ptx::wgmma_fence();
    issue_output_product<C>(o_, probabilities_, pass_.shared.values(pass_.state(n).stage), part);
  }

  // S of a tile of either kind, both halves. A near one's is by all columns.
  __device__ __forceinline__ void online_scores(int n) {
    if (n >= near_) {
      issue_scores(scores_of(kUpper), kUpper, n);
      issue_scores(scores_of(kLower), kLower, n);
      ptx::wgmma_wait<0>();
      return;
    }
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
      const auto state = pass_.key_state(n, piece);
      const std::uint32_t keys = pass_.shared.keys(state.stage);
      ptx::barrier_wait(pass_.shared.keys_full(state.stage), state.phase);
      ptx::wgmma_fence();
      issue_near_product<C>(scores_of(kUpper), near_queries_, keys, kUpper, piece);
      issue_near_product<C>(scores_of(kLower), near_queries_, keys, kLower, piece);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      arrive_warp(pass_.shared.keys_empty(state.stage));
    }
  }

  // Scores of a kept half by all columns; nothing is under way then.
  __device__ __forceinline__ void finish(float (&scores)[C::kHalf / 2], int part, int n) const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence();
    issue_near_product<C>(scores, near_queries_, pass_.shared.keys(pass_.key_state(n).stage), part, 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  // Whether a half is kept, whose scores are there. Then they are those that P is made of.
  __device__ __forceinline__ bool keeps(float (&scores)[C::kHalf / 2], int part, int n) {
    const bool kept = keeps_half<C>(scores, near_row_, consumer_);
    near_row_.kept += kept ? 1 : 0;
    if constexpr (C::kPieces == 1) {
      if (kept && finishes_) {
        finish(scores, part, n);
      }
    }
    return kept;
  }

  __device__ __forceinline__ void hide(float (&scores)[C::kHalf / 2], int part, int n) const {
    const int tile = pass_.tile(n);
    if (tile >= whole_) {
      apply_mask<C>(scores, pass_.p.problem, row_, tile * C::kKeys + part);
    }
  }
  // P of a half by an online row max, with its mask. One that is skipped is all hidden.
  template <class Part>
  __device__ __forceinline__ void exponentials_online(Part part, int n) {
    auto& scores = scores_of(part);
    if (n < near_ && !finishes_) {
      subtract(scores, near_row_.dropped);
    }
    hide(scores, part, n);
    if (n >= near_ && skips_) {
      if (!keeps(scores, part, n)) {
        subtract(scores, {INFINITY, INFINITY});
      } else if (finishes_) {
        hide(scores, part, n);
      }
    }
    float factor[2];
    const bool rescales = softmax_.update_row_max(scores, factor);
    softmax_.subtract_row_max(scores);
    softmax_.template exponentials<RowMax::online>(scores, true);
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(o_);
    if (rescales) {
      rescale(o_, factor);
    }
    pack<C>(scores, probabilities_);
  }
  // A tile whose scores are there. P of its lower half waits for its product then.
  __device__ __forceinline__ void attend_online(int n) {
    exponentials_online(kUpper, n);
    issue_output(kUpper, n);
    exponentials_online(kLower, n);
    if (n >= near_) {
      free_keys(n);
    }
  }
  __device__ __forceinline__ void attend_next_online(int n) {
    issue_output(kLower, n - 1);
    online_scores(n);
    ptx::warpgroup_fence_operand(o_);
    free_values(n - 1);
    attend_online(n);
  }

  // The far tiles from n on, of which there is one at least, as in forward.cuh.
  __device__ __forceinline__ void attend_all(int first) {
    const auto scores = [&](auto part, int n) { issue_scores(scores_of(part), part, n); };
    const auto output = [&](auto part, int n) { issue_output(part, n); };
    const auto exponentials = [&](auto part, int n, auto pending) {
      ptx::wgmma_wait<pending>();
      if constexpr (part == kLower) {
        free_keys(n);
      }
      softmax_.template exponentials<RowMax::fixed>(scores_of(part));
      ptx::wgmma_wait<pending - 1>();
      if constexpr (part == kUpper) {
        free_values(n - 1);
      }
      pack<C>(scores_of(part), probabilities_);
    };
    consume_ahead<C>(first, pass_.tiles, scores, output, exponentials);
  }

  // A half whose S is there, while P of the one before may wait for its product with V: S of the next half is issued
  // before. Returns whether its own P waits then; nothing is under way.
  template <class Part, class Waits>
  [[nodiscard]] __device__ __forceinline__ bool attend_if_kept(Part part, int n, Waits waits) {
    constexpr Half<C::kHalf - part> other;  // the one before in its tile or the one before, and the next one
    auto& scores = scores_of(part);
    issue_scores(scores_of(other), other, part == kUpper ? n : min(n + 1, pass_.tiles - 1));  // behind the last, again
    if constexpr (waits && part == kUpper) {
      wait_values(n - 1);  // unless its upper half was kept, nobody has
    }
    if constexpr (waits) {
      issue_output(other, part == kUpper ? n - 1 : n);
    }
    const bool kept = keeps(scores, part, n);
    if (kept) {
      softmax_.template exponentials<RowMax::fixed>(scores);
    }
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(o_);
    ptx::warpgroup_fence_operand(scores_of(other));
    if constexpr (part == kLower) {
      free_keys(n);
    } else if constexpr (waits) {
      free_values(n - 1);
    }
    if (kept) {
      pack<C>(scores, probabilities_);
    } else if (part == kLower && n < pass_.tiles - 1) {
      wait_and_free_values(n);
    }
    return kept;
  }
  // The far tiles from n on where some are skipped. Returns whether the last half's P waits.
  [[nodiscard]] __device__ __forceinline__ bool attend_kept(int n) {
    constexpr std::true_type yes;
    constexpr std::false_type no;
    bool waits = true;
    if (n < pass_.tiles) {
      issue_scores(scores_of(kUpper), kUpper, n);
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(scores_of(kUpper));
    }
#pragma unroll 1
    for (; n < pass_.tiles; ++n) {
      waits = waits ? attend_if_kept(kUpper, n, yes) : attend_if_kept(kUpper, n, no);
      waits = waits ? attend_if_kept(kLower, n, yes) : attend_if_kept(kLower, n, no);
    }
    return waits;
  }

  const Pass<C>& pass_;
  const int consumer_, row_;
  const int near_;   // tiles
  const int whole_;  // tiles that all rows see whole
  const bool skips_, finishes_;
  const std::uint32_t near_queries_;
  const Queries<C> queries_;
  float (&o_)[C::kValues / 2];
  Softmax<C>& softmax_;
  NearRow& near_row_;
  float s_[2][C::kHalf / 2];
  std::uint32_t probabilities_[C::kHalf / 16][4];
};

template <class C>
__device__ __forceinline__ unsigned consume_near(const Pass<C>& pass, int consumer, int row, RowMax row_max,
                                                 float (&o)[C::kValues / 2], Softmax<C>& softmax, NearRow& near_row) {
  load_row(pass.p, pass.work, row, near_row);
  ptx::barrier_wait(pass.shared.queries_full(), 0);
  return NearConsumer<C>(pass, consumer, row, o, softmax, near_row).consume(row_max);
}

}  // namespace distr::cuda::sm90
