// SPDX-License-Identifier: Apache-2.0
// The warpgroup that makes dQ where the consumers do not (backward.cuh): dQ = dS K of all tiles.
#pragma once

#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_mma.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace distr::cuda::sm90 {

template <class C>
__device__ __forceinline__ void make_query_gradients(const KeyWork<C>& work, const BackwardShared<C>& shared) {
  ptx::barrier_wait(shared.keys_full(), 0);
#pragma unroll 1
  for (int n = 0; n < work.tiles; ++n) {
    const PipelineState<C::kStages> state(n);
    float d_q[C::KeyTile::kPanelColumns / 2];
    ptx::barrier_wait(shared.d_s_full(state.stage), state.phase);
    multiply_query_gradients<C>(d_q, shared.d_s(state.stage), shared.keys() + opaque_zero(n));
    ptx::barrier_arrive(shared.queries_empty(state.stage));  // every thread, as in the consumers: dS is free
    wait_empty(shared.d_q_empty(state.stage), state.phase);
    store_dq_panel<C>(d_q, shared.d_q(state.stage), 0);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive_warp(shared.d_q_full(state.stage));
  }
}

}  // namespace distr::cuda::sm90
