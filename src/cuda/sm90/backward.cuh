// SPDX-License-Identifier: Apache-2.0
// dQ, dK and dV with wgmma and TMA, for sm_90a (method, 3), on what was made beforehand: q_hat and k_hat of
// one grouping for the whole sequence, or Q~ and K of groupings by blocks. Q and K stand for them below, as they are in
// exact attention.
//
//   A thread block owns kKeys keys of a query head, whose K and V stay in shared memory, and meets its tiles of kRows
//   queries, from the last to the first. Two consumer warpgroups own 64 keys each. For a tile:
//     S^T = K Q^T, dP^T = V dO^T              [64, kRows]
//     P = 2^(scale S - LSE)
//     dV += P^T dO                            [64, dv]     the accumulators of S^T are a left operand as they are
//     dS = P (dP - D)                                      while dV is on its way; to shared memory, where all meet
//     dK += dS^T Q                            [64, r]
//     dQ = dS K                               [kRows, r / 2] of all keys, a half of the columns each; to shared memory
//   S^T of the next tile is started behind dK. The rest depends on the registers there are (kSeparateDq):
//     - r <= 64: dP^T of the next tile is started behind its S^T, and dQ of this one behind dV of the next. A warpgroup
//       waits for the other's dS half a tile after its own, so they need not keep step: they take turns at the
//       exponentials, and one's products run under the other's.
//     - r = 128: dQ is started behind S^T of the next tile and runs under its exponentials; then dP^T takes its
//       registers.
//   With near keys (method, 8) a launch has all tiles of queries, near ones or far ones (QueryTiles). Of all, near ones
//   have another Q, other statistics and other sums of dQ, which is the producer's business alone.
//   The producer warpgroup: one warp loads the tiles by TMA, and one for each buffer of dQ adds them to their sums in
//   memory.
//   Shared memory: BackwardStorage (backward_config.h). K and V, rings of kStages tiles of Q, dO and dQ, two of dS^T.
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
//   As all blocks of a head go from the last tile to the first, each is behind the one before it by one hand-over and
//   from then on runs beside it. Callers who let the order change have no semaphores, and sums that begin as zeros.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_mma.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/softcap.cuh"

namespace distr::cuda::sm90 {

// Whether there is another tile behind the one at hand.
enum class Next : std::uint8_t { tile, none };

// A consumer: 64 keys and all tiles of queries.
template <class C>
class Consumer {
  using T = typename C::Element;

 public:
  // d_k, d_v: sums that begin as zeros.
  __device__ __forceinline__ Consumer(const BackwardParameters& p, const KeyWork<C>& work,
                                      const BackwardShared<C>& shared, int consumer, float (&d_k)[C::kColumns / 2],
                                      float (&d_v)[C::kValues / 2])
      : p_(p),
        problem_(p.problem),
        score_cap_(p.score_cap),
        work_(work),
        shared_(shared),
        consumer_(consumer),
        first_key_(work.key + 64 * consumer),
        edges_(edges(visible_rows<C>(p, shared.storage), first_key_)),
        keys_(loaded(shared.keys(), shared.keys_full()), 64 * consumer),
        values_(loaded(shared.values(), shared.values_full()), 64 * consumer),
        d_k_(d_k),
        d_v_(d_v) {}

  // All tiles, of which there is at least one.
  __device__ __forceinline__ void visit_all() {
    // Without these fences the compiler takes the zeros for results to wait for, and ends every wgmma before the next.
    ptx::warpgroup_fence_operand(d_k_);
    ptx::warpgroup_fence_operand(d_v_);
    issue_scores(0);
    if constexpr (C::kSeparateDq) {
      wait_for_d_o(0);
      issue_dp(0);
      clear_ds<C>(shared_.d_s(-1), consumer_);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(1, C::kConsumers * kWarpgroup);
    } else {
      ptx::wgmma_commit();  // an empty group in the place of dQ's
    }
    const int last = work_.tiles - 1;
#pragma unroll 1
    for (int n = 0; n < last; ++n) {
      visit_tile<Next::tile>(n);
    }
    visit_tile<Next::none>(last);
    if constexpr (C::kSeparateDq) {
      issue_dq(last);
    }
    wait_for_free_dq(last);
    ptx::wgmma_wait<0>();
    store_dq(last);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive_warp(shared_.d_q_full(PipelineState<C::kStages>(last).stage));
    ptx::warpgroup_fence_operand(d_k_);
    ptx::warpgroup_fence_operand(d_v_);
  }

 private:
  template <Next kNext>
  __device__ __forceinline__ void visit_tile(int n) {
    const PipelineState<C::kStages> state(n);
    const int row = work_.row(n);
    const bool edge = row < edges_.end || row > edges_.begin;

    ptx::wgmma_wait<1>();  // for S^T. What was issued behind it is still under way: dP^T, or dQ of the tile before
    if (n > 0) {
      const int stage = PipelineState<C::kStages>(n - 1).stage;
      // Every thread, not one of a warp: each has read LSE and D there, and racecheck knows no other order.
      ptx::barrier_arrive(shared_.queries_empty(stage));
      arrive_warp(shared_.d_o_empty(stage));
    }
    if (is_capped()) {
      cap_scores(s_, score_cap_);
    }
    if (edge) {
      hide_where_unseen(s_, row, -INFINITY);
    }
    if constexpr (C::kSeparateDq) {
      ptx::barrier_wait(shared_.pingpong(consumer_), static_cast<unsigned>(n + consumer_ + 1) & 1);
    }
    // Both at once: a load behind wgmma waits until that has begun.
    const QueryStats shift(shared_.stats(state.stage));
    const QueryStats d(shared_.stats(state.stage) + C::kStatsBytes / 2);
    if (is_capped()) {
      capped_exponentials<T>(s_, p_operand_, shift, problem_.scale_log2, score_cap_.inverse);
    } else {
      exponentials(s_, shift, problem_.scale_log2);
      pack_probabilities<T>(s_, p_operand_);
    }
    finish_dp(n);
    differentiate(s_, dp_, d);
    if (edge) {
      hide_where_unseen(dp_, row, 0.0F);  // dP may be infinite there
    }
    pack_probabilities<T>(dp_, ds_operand_);
    if (C::kSeparateDq && n > 0) {
      wait_for_free_dq(n - 1);
    }
    ptx::wgmma_wait<0>();
    if (C::kSeparateDq && n > 0) {
      store_dq(n - 1);
    }
    // Both consumers are done with dS of two tiles before, whose place this one takes: each has waited for the other's
    // dS of the tile before, which that stored after its dQ of the one before that.
    store_ds<C>(ds_operand_, shared_.d_s(n), consumer_);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive_warp(shared_.d_s_full(n));
    if (n > 0) {
      arrive_warp(shared_.d_q_full(PipelineState<C::kStages>(n - 1).stage));
    }
    issue_key_gradients<T, typename C::QueryTile>(d_k_, ds_operand_, shared_.queries(state.stage));
    if constexpr (kNext == Next::tile) {
      issue_scores(n + 1);
    }
    if constexpr (!C::kSeparateDq) {
      issue_dq(n);
    } else if constexpr (kNext == Next::tile) {
      wait_for_d_o(n + 1);
      issue_dp(n + 1);
    }
  }

  // Issues dV, as P is there, and waits for dP^T; between them dQ of the tile before is issued or stored.
  __device__ __forceinline__ void finish_dp(int n) {
    const std::uint32_t d_o = shared_.d_o(PipelineState<C::kStages>(n).stage);
    if constexpr (C::kSeparateDq) {
      issue_key_gradients<T, typename C::DoTile>(d_v_, p_operand_, d_o);
      __syncwarp();
      arrive_warp(shared_.pingpong(1 - consumer_));
      issue_dq(n - 1);
      ptx::wgmma_wait<2>();
    } else {
      // The branches of these waits also keep the compiler from putting the exponentials behind the wait for dQ.
      wait_for_d_o(n);
      if (n > 0) {
        wait_for_free_dq(n - 1);
      }
      ptx::wgmma_wait<0>();
      if (n > 0) {
        store_dq(n - 1);
      }
      issue_dp(n);
      issue_key_gradients<T, typename C::DoTile>(d_v_, p_operand_, d_o);
      ptx::wgmma_wait<1>();
    }
  }

  __device__ __forceinline__ void issue_scores(int n) {
    const PipelineState<C::kStages> state(n);
    ptx::barrier_wait(shared_.queries_full(state.stage), state.phase);
    issue_transposed_scores<T, typename C::QueryTile>(s_, keys_, shared_.queries(state.stage), opaque_zero(n));
  }
  __device__ __forceinline__ void wait_for_d_o(int n) const {
    const PipelineState<C::kStages> state(n);
    ptx::barrier_wait(shared_.d_o_full(state.stage), state.phase);
  }
  __device__ __forceinline__ void issue_dp(int n) {
    issue_transposed_scores<T, typename C::DoTile>(dp_, values_, shared_.d_o(PipelineState<C::kStages>(n).stage),
                                                   opaque_zero(n));
  }
  // Also for the tile before the first, whose dS is 0, so that every tile issues the same products.
  __device__ __forceinline__ void issue_dq(int n) {
    if (n >= 0) {
      ptx::barrier_wait(shared_.d_s_full(n), static_cast<unsigned>(n / C::kDsBuffers) & 1);
    }
    issue_query_gradients<C>(d_q(), shared_.d_s(n), shared_.keys() + opaque_zero(n + 1), consumer_);
  }
  // Waits for a free buffer of dQ in shared memory.
  __device__ __forceinline__ void wait_for_free_dq(int n) const {
    const PipelineState<C::kStages> state(n);
    wait_empty(shared_.d_q_empty(state.stage), state.phase);
  }
  __device__ __forceinline__ void store_dq(int n) { store_dq_tile<C>(d_q(), shared_.d_q(n), consumer_); }

  // The registers of dQ: those of dP^T, or their own.
  __device__ __forceinline__ auto& d_q() {
    if constexpr (C::kSeparateDq) {
      return dq_;
    } else {
      return dp_;
    }
  }

  __device__ __forceinline__ void hide_where_unseen(float (&x)[32], int row, float value) const {
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    hide<C>(x, visible_rows<C>(p_, shared_.storage), first_key_ + warp * 16, row, value);
  }
  // Tiles of queries that begin before `end` or behind `begin` have one that does not see all of the 64 keys.
  struct Edges {
    int end, begin;
  };
  template <class Rows>
  [[nodiscard]] __device__ __forceinline__ static Edges edges(const Rows& of, int first_key) {
    return {first_key + 64 > static_cast<int>(of.seq_k) ? INT_MAX
            : of.causal                                 ? first_key + 63 - static_cast<int>(of.causal_offset)
                                                        : INT_MIN,
            has_left_end(of) ? first_key - C::kRows + 1 - static_cast<int>(of.first_offset) : INT_MAX};
  }
  // Waits until what lies at the address has arrived.
  __device__ __forceinline__ static std::uint32_t loaded(std::uint32_t address, std::uint32_t full) {
    ptx::barrier_wait(full, 0);
    return address;
  }
  // 0, which the compiler does not know: else it would keep every descriptor of K and V in registers all along.
  __device__ __forceinline__ static unsigned opaque_zero(int n) { return static_cast<unsigned>(n) >> 20; }

  [[nodiscard]] __device__ __forceinline__ bool is_capped() const { return C::kCapsScores && score_cap_.cap != 0; }

  const BackwardParameters& p_;
  const DeviceProblem& problem_;
  const ScoreCap& score_cap_;
  const KeyWork<C>& work_;
  const BackwardShared<C>& shared_;
  const int consumer_, first_key_;
  const Edges edges_;
  const typename C::template LeftOperand<typename C::KeyTile> keys_;
  const typename C::template LeftOperand<typename C::ValueTile> values_;
  float (&d_k_)[C::kColumns / 2];
  float (&d_v_)[C::kValues / 2];
  float s_[32];   // S^T, then P^T
  float dp_[32];  // dP^T, then dS^T
  float dq_[C::kSeparateDq ? C::kColumns / 4 : 1];
  ProbabilityFragment p_operand_;
  ProbabilityFragment ds_operand_;
};

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
    ptx::barrier_init(shared.keys_full(), 1);
    ptx::barrier_init(shared.values_full(), 1);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::barrier_init(shared.queries_full(stage), 1);
      ptx::barrier_init(shared.queries_empty(stage), 32 * kConsumerWarps);
      ptx::barrier_init(shared.d_o_full(stage), 1);
      ptx::barrier_init(shared.d_o_empty(stage), kConsumerWarps);
      ptx::barrier_init(shared.d_q_full(stage), kConsumerWarps);
      ptx::barrier_init(shared.d_q_empty(stage), 1);
    }
    for (int n = 0; n < C::kDsBuffers; ++n) {
      ptx::barrier_init(shared.d_s_full(n), kConsumerWarps);
    }
    for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
      ptx::barrier_init(shared.pingpong(consumer), kConsumerWarps / C::kConsumers);
    }
    ptx::barrier_fence();
  }
  __syncthreads();

  const auto work = KeyWork<C>::of(storage, p);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (threadIdx.x % 32 == 0 && work.tiles > 0) {
      if (warp == 0) {
        load_all<C>(p, work, shared);
      } else if (warp <= C::kStages) {
        reduce_all<C>(p, work, shared, warp - 1);
      }
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
    store_keys<typename C::Element>(place, row, d_k, p.d_k_parts, p.d_k, p.d_k_strides, p.problem.head_dim, p.scale);
    store_keys<typename C::Element>(place, row, d_v, p.d_v_parts, p.d_v, p.d_v_strides, p.problem.head_dim_v, 1.0F);
    if (p.tiles == QueryTiles::far) {  // for who counts on both launches
      wait_on_dependent_grids();
    }
  }
}

}  // namespace distr::cuda::sm90
