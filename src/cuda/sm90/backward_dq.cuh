// SPDX-License-Identifier: Apache-2.0
// The warpgroup that makes dQ where the consumers do not (backward.cuh): dQ = dS K of all tiles.
#pragma once

#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_ds_sums.cuh"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_mma.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace distr::cuda::sm90 {

// sums_ds: whether rows' sums of dS are wanted of near tiles, which is known when the kernel is compiled.
template <class C, class SumsDs>
__device__ __forceinline__ void make_query_gradients(const KeyWork<C>& work, const BackwardShared<C>& shared,
                                                     SumsDs sums_ds) {
  ptx::barrier_wait(shared.keys_full(), 0);
#pragma unroll 1
  for (int n = 0; n < work.tiles; ++n) {
    const PipelineState<C::kStages> state(n);
    float d_q[C::KeyTile::kPanelColumns / 2];
    ptx::barrier_wait(shared.d_s_full(state.stage), state.phase);
    multiply_query_gradients<C>(d_q, shared.d_s(state.stage), shared.keys() + opaque_zero(n));
    const bool has_sums = sums_ds && work.is_near(n);
    const float2 sums = has_sums ? sum_ds_of_rows<C>(shared.d_s(state.stage)) : make_float2(0, 0);
    ptx::barrier_arrive(shared.queries_empty(state.stage));  // every thread, as in the consumers: dS is free
    wait_empty(shared.d_q_empty(state.stage), state.phase);
    if (has_sums) {
      store_ds_sums(shared.storage.d_q[state.stage].ds_sums, sums);
    }
    store_dq_panel<C>(d_q, shared.d_q(state.stage), 0);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive_warp(shared.d_q_full(state.stage));
  }
}

}  // namespace distr::cuda::sm90
