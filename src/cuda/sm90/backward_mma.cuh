// SPDX-License-Identifier: Apache-2.0
// The five products of the backward: four of the 64 keys that a warpgroup owns, and dQ of all keys.
#pragma once

#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/mma.cuh"

namespace distr::cuda::sm90 {

// 0, which the compiler does not know: else it would keep every descriptor of K and V in registers all along.
[[nodiscard]] __device__ __forceinline__ unsigned opaque_zero(int n) { return static_cast<unsigned>(n) >> 20; }

// Starts S^T = K Q^T or dP^T = V dO^T for 64 keys and a tile of 64 queries, or adds that.
template <class T, class P, class Left>
__device__ __forceinline__ void issue_transposed_scores(float (&s)[32], const Left& keys, std::uint32_t tile,
                                                        unsigned zero, bool adds) {
  const SharedOperand<P> queries(tile);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < P::kColumns / 16; ++step) {
    keys.template multiply<T>(s, step, queries.k_major(0, step), zero, adds || step > 0);
  }
  ptx::wgmma_commit();
}

// P^T or dS^T of 64 keys and 64 queries in 16 bits, the left operand of the products below.
using ProbabilityFragment = std::uint32_t[4][4];

template <class T>
__device__ __forceinline__ void pack_probabilities(const float (&s)[32], ProbabilityFragment& weights) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    weights[i / 4][i % 4] = ptx::pack(s[2 * i], s[2 * i + 1], T{});
  }
}

// Starts dV += P^T dO or dK += dS^T Q.
template <class T, class P>
__device__ __forceinline__ void issue_key_gradients(float (&sum)[P::kColumns / 2], const ProbabilityFragment& weights,
                                                    std::uint32_t tile) {
  const SharedOperand<P> queries(tile);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < P::kRows / 16; ++step) {
    ptx::wgmma<ptx::Major::mn>(sum, weights[step], queries.mn_major(step * 16, 0), true, T{});
  }
  ptx::wgmma_commit();
}

// Starts the columns of dQ = dS K that a panel of K has, all keys.
template <class C>
__device__ __forceinline__ void issue_query_gradients(float (&sum)[C::KeyTile::kPanelColumns / 2], std::uint32_t d_s,
                                                      std::uint32_t keys, int panel) {
  const SharedOperand<typename C::DsTile> left(d_s);
  const SharedOperand<typename C::KeyTile> right(keys + static_cast<std::uint32_t>(panel) * C::KeyTile::kPanelBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::kKeys / 16; ++step) {
    ptx::wgmma<ptx::Major::mn, ptx::Major::mn>(sum, left.mn_major(step * 16, 0), right.mn_major(step * 16, 0), step > 0,
                                               typename C::Element{});
  }
  ptx::wgmma_commit();
}

// dS^T of a consumer's keys to shared memory, where it is the left operand of dS K.
template <class C>
__device__ __forceinline__ void store_ds(const ProbabilityFragment& d_s, std::uint32_t tile, int consumer) {
  using P = typename C::DsTile;
  const unsigned lane = threadIdx.x % 32;
  const unsigned row = static_cast<unsigned>(consumer) * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
  const std::uint32_t start = tile + row * P::kRowBytes + (lane / 16 ^ row % 8) * 16;
#pragma unroll
  for (unsigned step = 0; step < 4; ++step) {
    ptx::stmatrix_x4(start ^ step * 32, d_s[step]);
  }
}

// dS of a warp's 16 queries and the 16 keys from `first` on, as left operand.
template <class C>
__device__ __forceinline__ void load_ds(std::uint32_t (&d_s)[4], std::uint32_t tile, int first) {
  using P = typename C::DsTile;
  const unsigned lane = threadIdx.x % 32;
  const unsigned chunk = threadIdx.x % kWarpgroup / 32 * 2 + lane / 8 % 2;
  const unsigned key = lane / 16 * 8 + lane % 8;
  ptx::ldmatrix_x4_trans(
      d_s, tile + key * P::kRowBytes + (chunk ^ key % 8) * 16 + static_cast<std::uint32_t>(first * P::kRowBytes));
}

// Makes dQ = dS K of all keys and columns. Ordinary loads of dS need no fence between the consumers' stores and wgmma.
template <class C>
__device__ __forceinline__ void multiply_query_gradients(float (&sum)[C::KeyTile::kPanelColumns / 2], std::uint32_t d_s,
                                                         std::uint32_t keys) {
  const SharedOperand<typename C::KeyTile> right(keys);
  constexpr int kBuffers = 3;
  std::uint32_t left[kBuffers][4];
#pragma unroll
  for (int step = 0; step < C::kKeys / 16; ++step) {
    if (step >= kBuffers) {
      ptx::wgmma_wait<kBuffers - 1>();
    }
    load_ds<C>(left[step % kBuffers], d_s, step * 16);
    ptx::wgmma_fence();
    ptx::wgmma<ptx::Major::mn>(sum, left[step % kBuffers], right.mn_major(step * 16, 0), step > 0,
                               typename C::Element{});
    ptx::wgmma_commit();
  }
  ptx::wgmma_wait<0>();
}

}  // namespace distr::cuda::sm90
