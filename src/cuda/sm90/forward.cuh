// SPDX-License-Identifier: Apache-2.0
// O = softmax(scale * q_hat k_hat^T) V with wgmma and TMA, for sm_90a (paper, Section 3.3).
//
//   Operands: q_hat was made beforehand, and so was k_hat of one grouping for the whole sequence. Where blocks of
//   queries have groupings of their own, the producer makes k_hat tile by tile, or q_hat is Q~ and k_hat is K.
//   Warpgroups: one producer, which sets its registers aside for the consumers, and kConsumers consumers of 64 queries
//   each. What the producer does is the key loader's: TmaKeys, GatherKeys, or FuseKeys, which has two producers. With
//   ConsumerTmaKeys there is none, and two blocks share an SM.
//   Shared memory: SharedStorage (config.h). q_hat of all consumers, then rings of kStages tiles of k_hat and of V.
//   Pipeline: the producer fills the free stages of both rings. A consumer goes through the tiles in halves of kHalf
//   keys:
//     S_0 = q_hat k_hat_0^T, row max, P_0                        one consumer after the other (Stagger)
//     for the next halves j, whose S_j was issued a half earlier:
//       O += P_(j-1) V_(j-1) and S_(j+1) = q_hat k_hat_(j+1)^T   both issued, on the tensor cores
//       P_j, as soon as S_j is there                             while these products still run
//     O += P V of the last half
//   Epilogue: O / rowsum and LSE to global memory; the producer prefetches to the L2 what the SM's next block reads.
//   With TmaKeys, and 128 columns or 256 keys a tile, the consumers take turns every 512 keys (Stagger).
//   Where two blocks share an SM, each has registers for one half's scores: S_j is issued with the product before it,
//   and both are waited for. In tiles with a mask and in the first without, nothing is issued ahead, and the row max is
//   online. From then on it is fixed; where q_hat carries the scale, there is none at all (RowMax, softmax.cuh). Where
//   that turns out not to do for a row, the block makes another pass, with an online row max and kHeadroom for V.
#pragma once

#include <type_traits>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/batch_entry.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/consumer.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/listed_keys.cuh"
#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/near_result.cuh"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/softcap.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

// Whether the first tile is apart from the loop over those with a mask and the first that all rows see, where consumers
// have fewer registers. Where blocks share an SM the compiler would wait after each product with a branch around one,
// and beside FuseKeys it would read the thread's number anew in each tile (docs/kernel-log.md, sm90/forward, step 76).
template <class C>
inline constexpr bool kPeelsFirst = C::kCtasPerSm > 1 || C::KeyLoader::kLoad == KeyLoad::fuse;

// A consumer's 64 queries in one pass. row: the thread's first. `row_max`: in the tiles without a mask; known or
// none: in all. Returns which of the thread's two rows are in range, a bit each.
template <class C>
__device__ __forceinline__ unsigned consume(const Pass<C>& pass, int consumer, int row, RowMax row_max,
                                            float (&o)[C::kValues / 2], Softmax<C>& softmax) {
  constexpr Half<C::kHalf> upper;
  constexpr Half<0> lower;
  constexpr int kAhead = C::kScoreBuffers - 1;  // products that may be under way where P of a half is made
  using Tile = TileInRing<C>;
  const Shared<C>& shared = pass.shared;
  const int tiles = pass.tiles;
  typename C::KeyLoader::template LoadsOfConsumer<C> loads(pass);
  float s[C::kScoreBuffers][C::kHalf / 2];
  std::uint32_t probabilities[C::kHalf / 16][4];
  const Queries<C> queries = read_queries<C>(shared, consumer);
  free_queries<C>(shared);

  const auto free_keys = [&](const Tile& tile) { arrive_warp(shared.keys_empty(tile.state().stage)); };
  const auto free_values = [&](const Tile& tile) { arrive_warp(shared.values_empty(tile.state().stage)); };
  const auto scores_of = [&](auto part) -> auto& { return s[part == upper ? 0 : kAhead]; };
  using Hidden = std::conditional_t<C::kIsListed, HiddenHalves<C>, HiddenOfAll<C>>;
  const auto hidden_in = [&](auto part, const Tile& tile) { return Hidden(pass, tile, part); };

  const auto issue_scores = [&](auto part, const Tile& tile) {
    if constexpr (part == upper) {
      ptx::barrier_wait(shared.keys_full(tile.state().stage), tile.state().phase);
    }
    ptx::wgmma_fence();
    issue_scores_product<C>(scores_of(part), queries, shared.keys(tile.state().stage), part);
  };
  const auto issue_output = [&](auto part, const Tile& tile) {
    if constexpr (part == upper) {
      C::Stages::values([&] { ptx::barrier_wait(shared.values_full(tile.state().stage), tile.state().phase); });
    }
    ptx::wgmma_fence();
    issue_output_product<C>(o, probabilities, shared.values(tile.state().stage), part);
  };
  const Stagger<C> stagger(consumer);
  const ScoreCap& cap = pass.p.score_cap;
  // P of a half whose scores are there, with its mask and an online row max; then no product is under way.
  const auto exponentials_online = [&](auto part, const Hidden& hidden) {
    auto& scores = scores_of(part);
    softmax.cap(scores, cap);
    hidden.hide_with_mask(scores, pass.visible(), row);
    online_exponentials<C>(row_max, softmax, scores, o);
    pack<C>(scores, probabilities);
  };
  const FixedShift<C> shift(shared, softmax);
  // P of a half behind whose scores so many products were issued, first O += P V of the half before.
  const auto exponentials = [&](auto caps, auto part, const Tile& tile, const Tile& before, auto pending) {
    auto& scores = scores_of(part);
    const Hidden hidden = hidden_in(part, tile);
    const float2 fixed_shift = shift.get();  // behind the wait the exponentials would wait for it, and for O += P V
    ptx::wgmma_wait<pending>();
    if constexpr (part == lower) {
      free_keys(tile);
    }
    hidden.hide(scores);
    if constexpr (caps) {
      softmax.capped_exponentials(scores, cap, fixed_shift);
    } else {
      softmax.template exponentials<kFirstPass<C>>(scores, fixed_shift);
    }
    if constexpr (pending > 0) {
      ptx::wgmma_wait<pending - 1>();
    }
    if constexpr (pending > 1) {  // another half comes
      stagger.pass_behind(part, tile.n);
    }
    if constexpr (part == upper) {
      free_values(before);
    }
    pack<C>(scores, probabilities);
  };
  Tile tile(pass);
  Tile before = tile;
  // Before the upper half of the first tile there is no product.
  const auto tile_online = [&](bool is_first) {
    issue_scores(upper, tile);
    if (is_first) {
      ptx::wgmma_wait<0>();
      stagger.pass_at_start();
    } else {
      issue_output(lower, before);
      ptx::wgmma_wait<kAhead>();
    }
    exponentials_online(upper, hidden_in(upper, tile));
    if (!is_first) {
      free_values(before);
    }
    issue_scores(lower, tile);
    issue_output(upper, tile);
    const Hidden hidden = hidden_in(lower, tile);
    ptx::wgmma_wait<kAhead>();
    free_keys(tile);
    exponentials_online(lower, hidden);
    loads.after_tile(tile.n);
    before = tile;
    tile = tile.next();
  };

  stagger.wait_at_start();
  if constexpr (kPeelsFirst<C>) {
    tile_online(true);
  }
  const int online_tiles = row_max == RowMax::online ? tiles : min(tiles, pass.masked + 1);
#pragma unroll 1
  while (tile.n < online_tiles) {
    tile_online(!kPeelsFirst<C> && tile.n == 0);
  }
  shift.fix();
  if constexpr (C::kScoreBuffers == 1) {
    consume_behind<C>(tile, before, tiles, issue_scores, issue_output, exponentials, loads);
  } else if (tile.n < tiles) {
    consume_ahead<C>(tile, before, tiles, stagger, cap, issue_scores, issue_output, exponentials);
  }
  issue_output(lower, before);
  ptx::wgmma_wait<0>();
  free_values(before);
  return row_max == RowMax::online ? kAllRows : rows_in_range<C>(o, softmax, online_tiles == tiles);
}

// The tiles that a thread block takes, before its first pass.
template <class C>
__device__ __forceinline__ void count_tiles(Pass<C>& pass) {
  const ForwardParameters& p = pass.p;
  if constexpr (C::kIsListed) {
    const auto tiles = [](int halves) { return (halves + kHalvesOfTile<C> - 1) / kHalvesOfTile<C>; };
    const KeyList list(p, pass.work);
    pass.tiles = tiles(list.count(0));
    pass.masked = tiles(list.count_masked(p, pass.work));
  } else {
    if constexpr (C::kIsRuns) {
      static_assert(C::kPhase != Phase::all);
      constexpr auto kSet = C::kPhase == Phase::near ? KeySet::near : KeySet::far;
      pass.keys = KeyRuns<C::kKeys>(p.problem, kSet, pass.work, C::kRows, p.row_end);
    } else {
      pass.keys = typename Pass<C>::Keys(pass.visible(), pass.work, C::kRows, pass.row_end());
    }
    pass.tiles = pass.keys.count();
    pass.masked = pass.keys.masked();
  }
}

// All passes of a producer: the first, and another one for as long as a consumer has rows left.
template <class C, class Produce>
__device__ __forceinline__ void produce_all(Pass<C> pass, const Produce& produce) {
  do {
    if (pass.tiles > 0) {
      produce(pass);
    }
    __syncwarp();
    pass.used += pass.tiles;
  } while (__syncthreads_or(0) != 0);
}

// All passes of a consumer.
template <class C>
__device__ __forceinline__ void consume_all(Pass<C> pass) {
  const int consumer = uniform(static_cast<int>(threadIdx.x) / kWarpgroup) - C::kFirstConsumer;
  const int row = pass.work.row + consumer * 64 + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
                  static_cast<int>(threadIdx.x) % 32 / 4;
  unsigned rows_left = kAllRows;
  do {
    float o[C::kValues / 2];
#pragma unroll
    for (float& x : o) {
      x = ptx::opaque(0.0F);  // else the compiler writes the zeros where wgmma is under way, and waits
    }
    Softmax<C> softmax(pass.p.problem.scale_log2);
    if constexpr (C::kIsListed) {
      if (pass.p.listed.set != KeySet::near) {
        begin_with_near_row_max(pass.p, pass.work, row, softmax);
      }
    }
    unsigned in_range = kAllRows;
    if (pass.tiles > 0) {
      // Where the compiler knows that the row max is online in all tiles, it waits after every single wgmma.
      const auto row_max =
          static_cast<RowMax>(ptx::opaque(static_cast<unsigned>(pass.used > 0 ? RowMax::online : kFirstPass<C>)));
      in_range = consume<C>(pass, consumer, row, row_max, o, softmax);
    }
    const float headroom = pass.used > 0 ? kHeadroom<C> : 1.0F;
    if constexpr (C::kIsListed) {
      if (pass.p.listed.set == KeySet::near) {
        store_near(pass.p, pass.work, row, rows_left & in_range, o, softmax, headroom);
      } else {
        store_merged(pass.p, pass.work, row, rows_left & in_range, o, softmax, headroom);
      }
    } else {
      store<C>(pass, row, rows_left & in_range, o, softmax, headroom);
    }
    rows_left &= ~in_range;
    pass.used += pass.tiles;
  } while (__syncthreads_or(static_cast<int>(rows_left)) != 0);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm) forward(const __grid_constant__ ForwardParameters p) {
  using Loader = typename C::KeyLoader;
  extern __shared__ __align__(1024) std::uint8_t memory[];
  auto& storage = *reinterpret_cast<typename C::Storage*>(memory);
  static_assert(fits<typename C::Storage>(C::kCtasPerSm));

  WorkTile work = p.scheduler.at(blockIdx.x);
  if constexpr (C::kTakesLengths) {
    // First, as uniform registers do not outlive the search, `shared` among them.
    if (p.lengths.exist() && !enter_entry<C>(p, work, storage.entry)) {
      return;
    }
  }
  const Shared<C> shared(storage);
  Pass<C> pass{p, work, shared, 0, 0, 0};
  count_tiles(pass);
  if (threadIdx.x == 0) {
    init_barriers<C>(shared);
  }
  if (!p.is_second) {
    wait_on_dependent_grids();
  }
  launch_dependent_grids();  // after the wait: is_second counts on the first launch's inputs being there
  __syncthreads();
  if (C::kProducers > 0 && threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<C::kRegisters.producer>();
    produce_all<C>(pass, [](const Pass<C>& each) { Loader::produce(each); });
    if (p.is_second) {
      wait_on_dependent_grids();
    }
  } else if (C::kProducers > 1 && threadIdx.x >= kWarpgroup * (C::kWarpgroups - 1)) {
    if constexpr (C::kProducers > 1) {
      ptx::setmaxnreg_dec<C::kRegisters.second_producer>();
      produce_all<C>(pass, [](const Pass<C>& each) { Loader::produce_second(each); });
    }
  } else {
    if constexpr (C::kProducers > 0) {
      ptx::setmaxnreg_inc<C::kRegisters.consumer>();
    }
    consume_all<C>(pass);
  }
}

}  // namespace distr::cuda::sm90
