// SPDX-License-Identifier: Apache-2.0
// Rows' sums of dS over near keys, which dQ of dropped columns needs (backward_means.cu). They are made of what the
// consumers leave in shared memory of a tile, and leave for memory behind its dQ, so their order is that of dQ's sums.
// The warpgroup that makes dQ makes them as well; where there is none, the producer warpgroup has a warp for them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_mma.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace distr::cuda::sm90 {

template <class C>
[[nodiscard]] __device__ __forceinline__ bool producer_sums_ds(const BackwardParameters& p) {
  return !C::kDqApart && p.near.sums_ds;
}

// The sums over all keys of a tile, of the 16 queries of which a warp of a warpgroup makes dQ: dS times ones. A lane
// has those of rows lane / 4 and lane / 4 + 8.
template <class C>
[[nodiscard]] __device__ __forceinline__ float2 sum_ds_of_rows(std::uint32_t d_s) {
  using T = typename C::Element;
  const std::uint32_t ones = ptx::pack(1.0F, 1.0F, T{});
  float sums[4] = {};
#pragma unroll
  for (int step = 0; step < C::kKeys / 16; ++step) {
    std::uint32_t left[4];
    load_ds<C>(left, d_s, step * 16);
    ptx::mma_16x8x16(sums, left, ones, ones, T{});
  }
  return make_float2(sums[0], sums[2]);
}

template <int kRows>
__device__ __forceinline__ void store_ds_sums(float (&to)[kRows], float2 sums) {
  const unsigned row = threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
  if (threadIdx.x % 4 == 0) {
    to[row] = sums.x;
    to[row + 8] = sums.y;
  }
}

// The sums of queries 2 lane and 2 lane + 1 over all keys of a tile, by one warp, whose few registers hold no operands.
template <class C>
[[nodiscard]] __device__ __forceinline__ float2 sum_ds_of_pairs(std::uint32_t d_s) {
  using Pair = std::conditional_t<std::is_same_v<typename C::Element, __half>, __half2, __nv_bfloat162>;
  using P = typename C::DsTile;
  static_assert(P::kRowBytes == 32 * sizeof(Pair));
  float2 sums = make_float2(0, 0);
#pragma unroll 1
  for (unsigned key = 0; key < 8; ++key) {  // and each eighth behind it: their chunks lie in one order, c at c ^ key
    float2 of_chunk = make_float2(0, 0);
#pragma unroll
    for (unsigned i = 0; i < C::kKeys; i += 8) {
      const std::uint32_t word = ptx::load_shared_4(d_s + key * P::kRowBytes + threadIdx.x % 32 * 4 +
                                                    static_cast<std::uint32_t>(i * P::kRowBytes));
      const auto pair = reinterpret_cast<const Pair&>(word);
      of_chunk.x += static_cast<float>(pair.x);
      of_chunk.y += static_cast<float>(pair.y);
    }
    sums.x += __shfl_xor_sync(~0U, of_chunk.x, key * 4);
    sums.y += __shfl_xor_sync(~0U, of_chunk.y, key * 4);
  }
  return sums;
}

// By a warp of the producer warpgroup, which has a part in freeing dS and in filling the buffers of dQ then.
template <class C>
__device__ __forceinline__ void sum_near_ds(const KeyWork<C>& work, const BackwardShared<C>& shared) {
#pragma unroll 1
  for (int n = 0; n < work.tiles; ++n) {
    const PipelineState<C::kStages> state(n);
    ptx::barrier_wait(shared.d_s_full(state.stage), state.phase);
    const bool is_near = work.is_near(n);
    const float2 sums = is_near ? sum_ds_of_pairs<C>(shared.d_s(state.stage)) : make_float2(0, 0);
    ptx::barrier_arrive(shared.queries_empty(state.stage));
    wait_empty(shared.d_q_empty(state.stage), state.phase);
    if (is_near) {
      reinterpret_cast<float2*>(shared.storage.d_q[state.stage].ds_sums)[threadIdx.x % 32] = sums;
    }
    ptx::fence_proxy_async();
    __syncwarp();
    arrive_warp(shared.d_q_full(state.stage));
  }
}

}  // namespace distr::cuda::sm90
