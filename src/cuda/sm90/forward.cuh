// SPDX-License-Identifier: Apache-2.0
// O = softmax(scale * q_hat k_hat^T) V with wgmma and the copy engine, for sm_90a (paper, Section 3.3), on q_hat that
// was made beforehand, and so was k_hat of one grouping for the whole sequence. Where blocks of queries have groupings
// of their own, k_hat is made here, tile by tile, of K^T (energy) or of K (lsh with few groups), or q_hat is Q~ and
// k_hat K.
//
//   A thread block takes kRows queries of one head. Its first warpgroup copies q_hat and then tile after tile of k_hat
//   and V to shared memory, kStages of each; where it sums columns of K, a fourth one copies. Every other warpgroup
//   owns 64 queries, q_hat in registers where there are enough (kQueriesStay), and goes through the tiles in halves:
//     S_0 = q_hat k_hat_0^T, references, P_0
//     for the next halves j, whose S_j was started a half earlier:
//       O += P_(j-1) V_(j-1) and S_(j+1) = q_hat k_hat_(j+1)^T   both started, on the tensor cores
//       P_j, as soon as S_j is there                             while these products still run
//     O += P V of the last half
//     O / rowsum, LSE
//   At its end the one that copies brings to the L2 what comes next (copies.cuh). Where two blocks share an SM, each
//   has registers for one half's scores: S_j is started with the product before it, and both are waited for. A thread
//   of a consumer copies, as there is no other warpgroup. In tiles with a mask and in the first without, nothing is
//   started ahead, and the references of the softmax follow the scores. From then on they stay; where q_hat carries the
//   scale, there are none at all. Where a row turns out to need better ones, the block starts again with references
//   that follow.
#pragma once

#include "cuda/early.cuh"
#include "cuda/rows.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/copies.cuh"
#include "cuda/sm90/products.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/summed_keys.cuh"

namespace distr::cuda::sm90 {

// Of the first pass, in tiles without a mask.
template <class C>
inline constexpr References kFirstPass = C::kScores == Scores::raw ? References::stay : References::none;

inline constexpr unsigned kAllRows = 3;  // of a thread, a bit each

// Which of a thread's two rows the references of the first pass were good enough for, a bit each. References that
// stayed: no score was so far above its own that P left the element's range, which O shows, or O fp32's; it had one,
// unless all tiles were followed, and not too large a one. None: the sum is neither so large nor so small. By each row
// alone, as its bits must not depend on those beside it, which may be later ones.
template <class C>
__device__ inline unsigned rows_in_range(const float (&o)[C::kValues / 2], const Softmax<C>& softmax,
                                         bool all_followed) {
  if (C::kWithout != Without::nothing) {
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
    const float sum = quad_sum(softmax.sum[half]);
    const bool is_enough =
        kFirstPass<C> == References::none
            ? sum > Softmax<C>::kLeastSum
            : softmax.has_small_reference(half) || (all_followed && softmax.reference[half] == -INFINITY);
    const bool fits = zero == 0.0F && sum < Softmax<C>::kMostSum && is_enough;
    rows |= (__ballot_sync(~0U, fits) & quad) == quad ? 1U << half : 0;
  }
  return rows;
}

// Of a thread's two rows those of `rows`.
template <class C>
__device__ inline void store(const ForwardParameters& p, const Rows& work, int first_row, unsigned rows,
                             const float (&o)[C::kValues / 2], const Softmax<C>& softmax) {
  using T = typename C::Element;
  const DeviceProblem& problem = p.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* const base = static_cast<T*>(p.o) + work.batch * problem.o.batch + work.head * problem.o.head;
  const int at_once = elements_at_once(base, problem.o.row);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = std::int64_t{first_row} + half * 8;
    const float sum = quad_sum(softmax.sum[half]);
    const bool is_there = row < p.row_end && (rows >> half & 1) != 0;
    if (is_there && p.lse != nullptr && lane % 4 == 0) {
      p.lse[(work.batch * problem.heads_q + work.head) * problem.seq_q + row] =
          natural_lse(Softmax<C>::finite(softmax.reference[half]) * softmax.scale, sum);
    }
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;  // no key is seen: O = 0
    store_row<C::kValues>(base + row * problem.o.row, is_there, problem.head_dim_v, at_once, [&](int n) {
      return make_float2(o[n * 4 + half * 2] * inverse, o[n * 4 + half * 2 + 1] * inverse);
    });
  }
}

// Tiles that every row from `row` on sees whole.
template <class C>
__device__ __forceinline__ int whole_tiles(const DeviceProblem& problem, int row) {
  const std::int64_t seen =
      problem.causal ? min(problem.seq_k, max(row + problem.causal_offset + 1, std::int64_t{0})) : problem.seq_k;
  return static_cast<int>(seen / C::kKeys);
}

// The tiles from n on, of which there is one at least: products are started before the exponentials of the half before
// theirs. The functions are compute()'s.
template <class Scores, class Output, class Weigh>
__device__ __forceinline__ void compute_ahead(int n, int tiles, const Scores& scores, const Output& output,
                                              const Weigh& weigh) {
  scores.template operator()<0>(n);
#pragma unroll 1
  for (; n < tiles - 1; ++n) {
    output.template operator()<1>(n - 1);
    scores.template operator()<1>(n);
    weigh.template operator()<0, 2>(n);
    output.template operator()<0>(n);
    scores.template operator()<0>(n + 1);
    weigh.template operator()<1, 2>(n);
  }
  output.template operator()<1>(n - 1);
  scores.template operator()<1>(n);
  weigh.template operator()<0, 2>(n);
  output.template operator()<0>(n);
  weigh.template operator()<1, 1>(n);
}

// A consumer's 64 queries over all keys. `used`: tiles that went through the ring before. `references`: in the tiles
// without a mask; none: in all. Returns which of the thread's two rows came out right, a bit each.
template <class C>
__device__ __forceinline__ unsigned compute(const ForwardParameters& p, const Rows& work, const Shared<C>& shared,
                                            int consumer, int row, int tiles, int used, References references,
                                            float (&o)[C::kValues / 2], Softmax<C>& softmax) {
  const DeviceProblem& problem = p.problem;
  const auto release_keys = [&](int n) { release(shared.keys_empty(Turn<C>(used + n).stage)); };
  const auto release_values = [&](int n) { release(shared.values_empty(Turn<C>(used + n).stage)); };

  const int whole = whole_tiles<C>(problem, work.row);
  CopiesBetween<C> copies(p, work, shared, tiles, used);
  float s[C::kScoreBuffers][C::kHalf / 2];      // of the upper and the lower half of a tile, if there are two
  constexpr int kAhead = C::kScoreBuffers - 1;  // products that may be under way where P of a half is made
  std::uint32_t probabilities[C::kHalf / 16][4];
  ptx::barrier_wait(shared.queries_full(), 0);
  const Queries<C> queries(shared.queries(consumer), 0);

  // The products of a half of tile n: the upper one, 0, goes first, as the last tile does.
  const auto scores = [&]<int kPart>(int n) {
    const Turn<C> turn(used + n);
    if constexpr (kPart == 0) {
      ptx::barrier_wait(shared.keys_full(turn.stage), turn.parity);
    }
    ptx::wgmma_fence();
    start_scores<C>(s[kPart * kAhead], queries, shared.keys(turn.stage), (1 - kPart) * C::kHalf);
  };
  const auto output = [&]<int kPart>(int n) {
    const Turn<C> turn(used + n);
    if constexpr (kPart == 0 && C::kWithout != Without::values) {
      ptx::barrier_wait(shared.values_full(turn.stage), turn.parity);
    }
    ptx::wgmma_fence();
    start_output<C>(o, probabilities, shared.values(turn.stage), (1 - kPart) * C::kHalf);
  };
  // P of a half whose scores are there; then nothing is under way.
  const auto weigh_following = [&]<int kPart>(int n) {
    float(&scores_of)[C::kHalf / 2] = s[kPart * kAhead];
    if (tiles - 1 - n >= whole) {
      apply_mask<C>(scores_of, problem, row, (tiles - 1 - n) * C::kKeys + (1 - kPart) * C::kHalf);
    }
    float factor[2];
    const bool moved = references != References::none && softmax.update(scores_of, factor);
    const bool subtracted = C::kScores == Scores::raw && references == References::follow;
    if (subtracted) {
      softmax.subtract_references(scores_of);
    }
    softmax.template exponentials<References::follow>(scores_of, subtracted);
    ptx::wgmma_wait<0>();
    if (moved) {
      rescale(o, factor);
    }
    pack<C>(scores_of, probabilities);
  };
  // P of a half after whose scores kLater products were started, that of the half before first.
  const auto weigh = [&]<int kPart, int kLater>(int n) {
    ptx::wgmma_wait<kLater>();
    if constexpr (kPart == 1) {
      release_keys(n);
    }
    softmax.template exponentials<kFirstPass<C>>(s[kPart * kAhead]);
    if constexpr (kLater > 0) {
      ptx::wgmma_wait<kLater - 1>();
    }
    if constexpr (kPart == 0) {
      release_values(n - 1);
    }
    pack<C>(s[kPart * kAhead], probabilities);
  };
  const auto lower_following = [&](int n) {
    scores.template operator()<1>(n);
    output.template operator()<0>(n);
    ptx::wgmma_wait<kAhead>();
    release_keys(n);
    weigh_following.template operator()<1>(n);
    copies.follow(n);
  };

  scores.template operator()<0>(0);
  ptx::wgmma_wait<0>();
  weigh_following.template operator()<0>(0);
  lower_following(0);
  int n = 1;  // of tiles with a mask and the first that all rows see
  const int followed = references == References::follow ? tiles : min(tiles, tiles - whole + 1);
#pragma unroll 1
  for (; n < followed; ++n) {
    scores.template operator()<0>(n);
    output.template operator()<1>(n - 1);
    ptx::wgmma_wait<kAhead>();
    weigh_following.template operator()<0>(n);
    release_values(n - 1);
    lower_following(n);
  }
  if constexpr (C::kScoreBuffers == 1) {
#pragma unroll 1
    for (; n < tiles; ++n) {
      scores.template operator()<0>(n);
      output.template operator()<1>(n - 1);
      weigh.template operator()<0, 0>(n);
      scores.template operator()<1>(n);
      output.template operator()<0>(n);
      weigh.template operator()<1, 0>(n);
      copies.follow(n);
    }
  } else if (n < tiles) {
    compute_ahead(n, tiles, scores, output, weigh);
  }
  output.template operator()<1>(tiles - 1);
  ptx::wgmma_wait<0>();
  release_values(tiles - 1);
  return references == References::follow ? kAllRows : rows_in_range<C>(o, softmax, followed == tiles);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) forward(const __grid_constant__ ForwardParameters p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  __shared__ std::uint64_t barriers[Shared<C>::kBarriers];
  const Shared<C> shared{__shfl_sync(~0U, ptx::shared_address(memory), 0),
                         __shfl_sync(~0U, ptx::shared_address(barriers), 0)};

  const Rows work = p.tiles.at(blockIdx.x);
  const DeviceProblem& problem = p.problem;
  std::int64_t keys = problem.seq_k;
  if (problem.causal) {
    const std::int64_t last = min(std::int64_t{work.row} + C::kRows, p.row_end) - 1;
    keys = min(max(last + problem.causal_offset + 1, std::int64_t{0}), problem.seq_k);
  }
  const int tiles = static_cast<int>((keys + C::kKeys - 1) / C::kKeys);

  if (threadIdx.x == 0) {
    ptx::barrier_init(shared.queries_full(), 1);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::barrier_init(shared.keys_full(stage), kArrivals<C>);
      ptx::barrier_init(shared.values_full(stage), 1);
      ptx::barrier_init(shared.keys_empty(stage), 4 * C::kConsumers);  // a warp of a consumer each
      ptx::barrier_init(shared.values_empty(stage), 4 * C::kConsumers);
    }
    for (int stage = 0; stage < C::Source::kStages; ++stage) {
      ptx::barrier_init(shared.source_full(stage), 1);
      ptx::barrier_init(shared.source_empty(stage), C::kWarpgroup / 32);
    }
    ptx::barrier_fence();
  }
  if (!p.is_second) {
    wait_for_inputs();
  }
  release_dependent();  // after the wait: is_second counts on the first launch's inputs being there
  __syncthreads();
  const auto again = [&](unsigned rows_left) { return __syncthreads_or(static_cast<int>(rows_left)) != 0; };
  if (!C::kShares && threadIdx.x < C::kWarpgroup) {
    ptx::give_registers<C::kFirstRegisters>();
    int used = 0;
    do {
      if (tiles > 0) {
        if constexpr (C::kSums) {
          sum_all<C>(p, work, shared, tiles, used);
        } else {
          copy_all<C>(p, work, shared, tiles, used);
        }
      }
      __syncwarp();
      used += tiles;
    } while (again(0));
    if (p.is_second) {
      wait_for_inputs();
    }
  } else if (C::kSums && threadIdx.x >= C::kWarpgroup * (C::kWarpgroups - 1)) {
    ptx::give_registers<C::kAskRegisters>();
    int used = 0;
    do {
      if constexpr (C::kSums) {
        if (tiles > 0) {
          ask_all<C>(p, work, shared, tiles, used);
        }
      }
      __syncwarp();
      used += tiles;
    } while (again(0));
  } else {
    if constexpr (!C::kShares) {
      ptx::take_registers<C::kComputeRegisters>();
    }
    // The same for all threads of a warp, which the compiler cannot see.
    const int consumer = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / C::kWarpgroup, 0) - C::kFirstConsumer;
    const int row = work.row + consumer * 64 + static_cast<int>(threadIdx.x) % C::kWarpgroup / 32 * 16 +
                    static_cast<int>(threadIdx.x) % 32 / 4;
    int used = 0;
    unsigned rows_left = kAllRows;
    do {
      float o[C::kValues / 2];
#pragma unroll
      for (float& x : o) {
        x = __uint_as_float(ptx::opaque(0));  // else the compiler writes the zeros where wgmma is under way, and waits
      }
      Softmax<C> softmax(problem.scale_log2);
      unsigned right = kAllRows;
      if (tiles > 0) {
        // Where the compiler knows that all references follow, it waits after every single wgmma.
        const auto references =
            static_cast<References>(ptx::opaque(static_cast<unsigned>(used > 0 ? References::follow : kFirstPass<C>)));
        right = compute<C>(p, work, shared, consumer, row, tiles, used, references, o, softmax);
      }
      store<C>(p, work, row, rows_left & right, o, softmax);
      rows_left &= ~right;
      used += tiles;
    } while (again(rows_left));
  }
}

}  // namespace distr::cuda::sm90
