// SPDX-License-Identifier: Apache-2.0
// dQ, dK and dV with wgmma and TMA, for sm_90a (method, 3), on what was made beforehand: q_hat and k_hat of
// one grouping for the whole sequence, or Q~ and K of groupings by blocks. Q and K stand for them below, as they are in
// exact attention.
//
//   A thread block owns kKeys keys of a query head, whose K and V stay in shared memory, and meets its tiles of kRows
//   queries, or those of a piece (SplitKeys), from the last to the first. Two consumer warpgroups own 64 keys each. For
//   a tile:
//     S^T = K Q^T - LSE / scale               [64, kRows]  statistics are columns that ones meet
//     dP^T = V dO^T - D                       [64, kRows]
//     P = 2^(scale S)
//     dV += P^T dO                            [64, dv]     the accumulators of S^T are a left operand as they are
//     dS = P dP                                            to shared memory, where all meet
//     dK += dS^T Q                            [64, r]
//     dQ = dS K                               [kRows, r] of all keys; to shared memory
//   Registers decide who makes dQ, and in which order (backward_consumer.cuh):
//     - r <= 64: a warpgroup of its own makes dQ of what the consumers leave in shared memory, so that neither waits
//       for dQ. They take turns at P and dS: one's exponentials run under the other's products and under dQ. The
//       exponentials run under dP^T, too, and dK under S^T and dP^T of the next tile.
//     - r = 128: the consumers make a half of its columns each, in the registers of dP^T, and a tile has its products
//       to itself. The exponentials run under dP^T, dS is made and stored under dV, and dQ is stored under dK.
//   With near keys (method, 8) a launch has all tiles of queries, near ones or far ones (QueryTiles). Of all, near ones
//   have another Q, other statistics and other sums of dQ. A row's sum of dS over near keys, for dQ of dropped columns,
//   lies behind its tile's dQ (backward_ds_sums.cuh).
//   The producer warpgroup: one warp loads the tiles by TMA, and one for each buffer of dQ adds them to their sums in
//   memory. Where r = 128 the last one sums dS.
//   Shared memory: BackwardStorage (backward_config.h). K and V, rings of kStages tiles of Q, dO, dS^T and dQ.
//
//   The sum of a tile is made in the order of the keys, but in a launch of near tiles with sinks last, so its bits are
//   the same in every run: dq_semaphore[tile] counts the blocks that have added to it, and a block waits until all of
//   those before it have. The first writes instead, but with near keys, where sums begin as zeros. There is no
//   deadlock:
//     - A block begins by taking a ticket, which says which keys are its own; CUDA starts blocks in whatever order. It
//       waits only for those before it in that order, of its own head, whose tickets are smaller
//       (cuda/backward_scheduler.cuh), so all of them have started.
//     - The first block waits for none, and so gets through all of its tiles; then so does the next.
//     - Who sees a tile are the first so many blocks, also where attention is causal: nobody in the order is left out.
//       With a sliding window, and where a launch has near or far tiles alone, only blocks that meet the tile count
//       (KeyWork::turn).
//     - Where blocks of keys are split (SplitKeys), one piece of a block meets a tile, and pieces begin in the order of
//       their blocks.
//   As all blocks of a head go from the last tile to the first, each is behind the one before it by one hand-over and
//   from then on runs beside it. Callers who let the order change have no semaphores, and sums that begin as zeros.
#pragma once

#include <type_traits>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_consumer.cuh"
#include "cuda/sm90/backward_dq.cuh"
#include "cuda/sm90/backward_ds_sums.cuh"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_producer.cuh"

namespace distr::cuda::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) backward(const __grid_constant__ BackwardParameters p) {
  if (p.tiles != QueryTiles::far) {  // the second of two launches, which run side by side
    wait_on_dependent_grids();
  }
  launch_dependent_grids();  // after the wait: the second launch counts on the first one's inputs being there
  extern __shared__ __align__(1024) std::uint8_t memory[];
  auto& storage = *reinterpret_cast<BackwardStorage<C>*>(memory);
  static_assert(fits<BackwardStorage<C>>(1));
  if constexpr (C::kTakesLengths) {  // before `shared`, as in the forward
    if (p.lengths.packed && !enter_sequence<C>(p, storage.sequence)) {
      return;
    }
  }
  const BackwardShared<C> shared(storage);

  if (threadIdx.x == 0) {
    if (!is_packed<C>(p)) {
      storage.block = p.ticket != nullptr ? atomicAdd(p.ticket, 1U) : blockIdx.x;
    }
    constexpr unsigned kConsumerWarps = 4 * C::kConsumers;
    constexpr unsigned kDqWarps = 4 * C::kDqWarpgroups;
    const unsigned sum_warps = producer_sums_ds<C>(p) ? 1 : 0;
    ptx::barrier_init(shared.keys_full(), 1);
    ptx::barrier_init(shared.values_full(), 1);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::barrier_init(shared.queries_full(stage), 1);
      ptx::barrier_init(shared.queries_empty(stage), 32 * (kConsumerWarps + C::kDqApart * kDqWarps + sum_warps));
      if constexpr (!C::kDqApart) {
        ptx::barrier_init(shared.d_o_full(stage), 1);
        ptx::barrier_init(shared.d_o_empty(stage), kConsumerWarps);
      }
      ptx::barrier_init(shared.d_s_full(stage), kConsumerWarps);
      ptx::barrier_init(shared.d_q_full(stage), kDqWarps + sum_warps);
      ptx::barrier_init(shared.d_q_empty(stage), 1);
    }
    for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
      ptx::barrier_init(shared.pingpong(consumer), kConsumerWarps / C::kConsumers);
    }
    ptx::barrier_fence();
  }
  if constexpr (C::kOnesInShared) {
    if (threadIdx.x < 32) {
      store_ones(storage.ones);
      ptx::fence_proxy_async();
    }
  }
  __syncthreads();

  const auto work = KeyWork<C>::of(storage, p);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (warp == 1 + C::kStages) {
      if (producer_sums_ds<C>(p)) {
        sum_near_ds<C>(work, shared);
      }
    } else if (threadIdx.x % 32 == 0 && work.tiles > 0) {
      if (warp == 0) {
        load_all<C>(p, work, shared);
      } else {
        reduce_all<C>(p, work, shared, warp - 1);
      }
    }
  } else if (C::kDqApart && threadIdx.x >= (1 + C::kConsumers) * kWarpgroup) {
    ptx::setmaxnreg_dec<C::kDqRegisters>();
    if (work.tiles > 0 && p.near.sums_ds) {
      make_query_gradients<C>(work, shared, std::true_type{});
    } else if (work.tiles > 0) {
      make_query_gradients<C>(work, shared, std::false_type{});
    }
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    const int consumer = warp / 4 - 1;
    float d_k[C::kColumns / 2];
    float d_v[C::kValues / 2];
#pragma unroll
    for (float& x : d_k) {
      x = ptx::opaque(0.0F);  // else the compiler writes the zeros where wgmma is under way, and waits
    }
#pragma unroll
    for (float& x : d_v) {
      x = ptx::opaque(0.0F);
    }
    if (work.tiles > 0) {
      Consumer<C>(p, work, shared, consumer, d_k, d_v).visit_all();
    }
    const int row = work.key + (warp - 4) * 16;  // this warp's first key
    const KeyPlace place = place_of<C>(p, work, storage);
    store_keys<typename C::Element>(place, row, d_k, place.is_piece ? p.split.d_k : p.d_k_parts, p.d_k, p.d_k_strides,
                                    p.problem.head_dim, p.scale);
    if (p.tiles == QueryTiles::far) {  // what near keys found is there then, also for who counts on both launches
      wait_on_dependent_grids();
    }
    if (p.near_d_v != nullptr) {
      add_near_values<C>(p, std::int64_t{work.batch} * p.problem.heads_q + work.head, work.number, row, d_v);
    }
    store_keys<typename C::Element>(place, row, d_v, place.is_piece ? p.split.d_v : p.d_v_parts, p.d_v, p.d_v_strides,
                                    p.problem.head_dim_v, 1.0F);
  }
}

}  // namespace distr::cuda::sm90
