// SPDX-License-Identifier: Apache-2.0
// A consumer of the backward (backward.cuh): its steps, and the two orders in which it takes them.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_mma.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/softcap.cuh"

namespace distr::cuda::sm90 {

// 64 keys and all tiles of queries.
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
        edges_(edges(visible_rows<C>(p, shared.storage), first_key_, is_capped())),
        ones_(shared.ones()),
        keys_(loaded(shared.keys(), shared.keys_full()), 64 * consumer),
        values_(loaded(shared.values(), shared.values_full()), 64 * consumer),
        d_k_(d_k),
        d_v_(d_v) {}

  // All tiles, of which there is at least one.
  __device__ __forceinline__ void visit_all() {
    // Without these fences the compiler takes the zeros for results to wait for, and ends every wgmma before the next.
    ptx::warpgroup_fence_operand(d_k_);
    ptx::warpgroup_fence_operand(d_v_);
    if constexpr (C::kDqApart) {
      visit_overlapped();
    } else {
      visit_one_by_one();
    }
    ptx::warpgroup_fence_operand(d_k_);
    ptx::warpgroup_fence_operand(d_v_);
  }

 private:
  // Nothing is under way between two tiles.
  __device__ __forceinline__ void visit_one_by_one() {
#pragma unroll 1
    for (int n = 0; n < work_.tiles; ++n) {
      const int row = work_.row(n);
      const bool edge = edges_.has(row);
      wait_for_queries(n);
      issue_scores(n);
      wait_for_d_o(n);
      issue_dp(n);
      ptx::wgmma_wait<1>();  // for S^T
      limit_scores(row, edge);
      make_probabilities(n, edge);
      ptx::wgmma_wait<0>();
      issue_dv(n);
      make_ds(row, edge);
      share_ds(n);
      issue_dq(n);
      issue_dk(n);
      wait_for_free_dq(n);
      ptx::wgmma_wait<1>();  // for dQ, and dV before it
      free_d_o(n);
      store_dq(n);
      ptx::wgmma_wait<0>();
      free_queries(n);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    arrive_warp(shared_.d_q_full(stage_of(work_.tiles - 1)));
  }

  // dK of a tile is under way beside S^T and dP^T of the next. Only dS leaves a consumer. The two take turns at it, so
  // that the exponentials of one run under the products of the other.
  __device__ __forceinline__ void visit_overlapped() {
    wait_for_queries(0);  // and for dO
#pragma unroll 1
    for (int n = 0; n < work_.tiles; ++n) {
      const int row = work_.row(n);
      const bool edge = edges_.has(row);
      issue_scores(n);
      issue_dp(n);
      ptx::wgmma_wait<1>();  // for S^T, and dK of the tile before
      if (n > 0) {
        free_queries(n - 1);
      }
      limit_scores(row, edge);
      wait_for_turn(n);
      make_probabilities(n, edge);
      if constexpr (C::kDvFirst) {
        issue_dv(n);
        ptx::wgmma_wait<1>();  // for dP^T
      } else {
        ptx::wgmma_wait<0>();
      }
      make_ds(row, edge);
      share_ds(n);
      if (n + 1 < work_.tiles) {  // before dK: what accesses memory behind products waits until they have begun
        wait_for_queries(n + 1);
      }
      if constexpr (!C::kDvFirst) {
        issue_dv(n);
      }
      issue_dk(n);
      ptx::wgmma_wait<1>();  // for dV, so that P^T gives back its registers
    }
    ptx::wgmma_wait<0>();
  }

  // The products.
  // S^T - LSE, unless scores are capped.
  __device__ __forceinline__ void issue_scores(int n) {
    issue_transposed_scores<T, typename C::QueryTile>(s_, keys_, shared_.queries(stage_of(n)), opaque_zero(n), ones_,
                                                      shift_operand(stats(n)));
  }
  // dP^T - D.
  __device__ __forceinline__ void issue_dp(int n) {
    issue_transposed_scores<T, typename C::DoTile>(dp_, values_, shared_.d_o(stage_of(n)), opaque_zero(n), ones_,
                                                   minus_d_operand(stats(n)));
  }
  __device__ __forceinline__ void issue_dv(int n) {
    issue_key_gradients<T, typename C::DoTile>(d_v_, p_operand_, shared_.d_o(stage_of(n)));
  }
  __device__ __forceinline__ void issue_dk(int n) {
    issue_key_gradients<T, typename C::QueryTile>(d_k_, ds_operand_, shared_.queries(stage_of(n)));
  }

  // Behind both consumers' dS. dQ takes the registers of dP^T.
  __device__ __forceinline__ void issue_dq(int n) {
    const PipelineState<C::kStages> state(n);
    ptx::barrier_wait(shared_.d_s_full(state.stage), state.phase);
    issue_query_gradients<C>(dp_, shared_.d_s(state.stage), shared_.keys() + opaque_zero(n + 1), consumer_);
  }

  // S^T becomes what P^T is made of.
  __device__ __forceinline__ void limit_scores(int row, bool edge) {
    if (edge) {
      if (is_capped()) {
        cap_scores(s_, score_cap_);
      }
      hide_where_unseen(s_, row, -INFINITY);
    }
  }
  __device__ __forceinline__ void make_probabilities(int n, bool edge) {
    if (edge && is_capped()) {
      capped_exponentials<T>(s_, p_operand_, stats(n), problem_.scale_log2, score_cap_.inverse);
    } else {
      exponentials(s_, problem_.scale_log2);
      pack_probabilities<T>(s_, p_operand_);
    }
  }
  __device__ __forceinline__ void make_ds(int row, bool edge) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      dp_[i] *= s_[i];
    }
    if (edge) {
      hide_where_unseen(dp_, row, 0.0F);  // dP may be infinite there
    }
    pack_probabilities<T>(dp_, ds_operand_);
  }

  // Where a warpgroup of its own makes dQ the consumers take turns at P and dS.
  __device__ __forceinline__ void wait_for_turn(int n) const {
    ptx::barrier_wait(shared_.pingpong(consumer_), static_cast<unsigned>(n + consumer_ + 1) & 1);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (C::kDqApart) {
      __syncwarp();
      arrive_warp(shared_.pingpong(1 - consumer_));
    }
  }

  // dS^T to shared memory, for who makes dQ.
  __device__ __forceinline__ void share_ds(int n) {
    const PipelineState<C::kStages> state(n);
    // Its place is free, as who makes dQ frees it together with the tile's Q, for which the producer waits.
    if constexpr (C::kStatsInDs) {  // statistics, which all of the warpgroup have read then
      ptx::named_barrier_sync(1 + consumer_, kWarpgroup);
    }
    store_ds<C>(ds_operand_, shared_.d_s(state.stage), consumer_);
    pass_turn();
    if constexpr (!C::kDqApart) {
      ptx::fence_proxy_async();  // and for dQ of the tile before
    }
    __syncwarp();
    arrive_warp(shared_.d_s_full(state.stage));
    if (!C::kDqApart && n > 0) {
      arrive_warp(shared_.d_q_full(stage_of(n - 1)));
    }
  }
  __device__ __forceinline__ void store_dq(int n) { store_dq_panel<C>(dp_, shared_.d_q(stage_of(n)), consumer_); }

  __device__ __forceinline__ void wait_for_queries(int n) const {
    const PipelineState<C::kStages> state(n);
    ptx::barrier_wait(shared_.queries_full(state.stage), state.phase);
  }
  __device__ __forceinline__ void wait_for_d_o(int n) const {
    const PipelineState<C::kStages> state(n);
    ptx::barrier_wait(shared_.d_o_full(state.stage), state.phase);
  }
  // Waits for a free buffer of dQ in shared memory.
  __device__ __forceinline__ void wait_for_free_dq(int n) const {
    const PipelineState<C::kStages> state(n);
    wait_empty(shared_.d_q_empty(state.stage), state.phase);
  }
  __device__ __forceinline__ void free_queries(int n) const {
    // Every thread, not one of a warp: each may have read LSE there, and racecheck knows no other order.
    ptx::barrier_arrive(shared_.queries_empty(stage_of(n)));
  }
  __device__ __forceinline__ void free_d_o(int n) const { arrive_warp(shared_.d_o_empty(stage_of(n))); }

  [[nodiscard]] __device__ __forceinline__ static int stage_of(int n) { return PipelineState<C::kStages>(n).stage; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t stats(int n) const {
    return shared_.stats(stage_of(n), consumer_);
  }

  __device__ __forceinline__ void hide_where_unseen(float (&x)[32], int row, float value) const {
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    hide<C>(x, visible_rows<C>(p_, shared_.storage), first_key_ + warp * 16, row, value);
  }
  // Tiles of queries that begin before `end` or behind `begin` have one that does not see all of the 64 keys. Where
  // scores are capped, all are taken for such tiles, so that the others need not ask.
  struct Edges {
    int end, begin;
    [[nodiscard]] __device__ __forceinline__ bool has(int row) const { return row < end || row > begin; }
  };
  template <class Rows>
  [[nodiscard]] __device__ __forceinline__ static Edges edges(const Rows& of, int first_key, bool capped) {
    return {capped || first_key + 64 > static_cast<int>(of.seq_k) ? INT_MAX
            : of.causal                                           ? first_key + 63 - static_cast<int>(of.causal_offset)
                                                                  : INT_MIN,
            has_left_end(of) ? first_key - C::kRows + 1 - static_cast<int>(of.first_offset) : INT_MAX};
  }
  // Waits until what lies at the address has arrived.
  __device__ __forceinline__ static std::uint32_t loaded(std::uint32_t address, std::uint32_t full) {
    ptx::barrier_wait(full, 0);
    return address;
  }
  [[nodiscard]] __device__ __forceinline__ bool is_capped() const { return C::kCapsScores && score_cap_.cap != 0; }

  const BackwardParameters& p_;
  const DeviceProblem& problem_;
  const ScoreCap& score_cap_;
  const KeyWork<C>& work_;
  const BackwardShared<C>& shared_;
  const int consumer_, first_key_;
  const Edges edges_;
  const typename C::Ones ones_;
  const typename C::KeyOperand keys_;
  const typename C::ValueOperand values_;
  float (&d_k_)[C::kColumns / 2];
  float (&d_v_)[C::kValues / 2];
  float s_[32];   // S^T, then P^T
  float dp_[32];  // dP^T, then dS^T
  ProbabilityFragment p_operand_;
  ProbabilityFragment ds_operand_;
};

}  // namespace distr::cuda::sm90
