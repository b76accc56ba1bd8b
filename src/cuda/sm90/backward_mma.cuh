// SPDX-License-Identifier: Apache-2.0
// The five products of the backward: four of the 64 keys that a warpgroup owns, and dQ of all keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/mma.cuh"

namespace distr::cuda::sm90 {

// A tile of 16-byte rows, eight columns, whose next eight columns lie so many bytes behind, and its next eight rows.
[[nodiscard]] __device__ __forceinline__ std::uint64_t plain_descriptor(std::uint32_t tile, std::uint32_t next_columns,
                                                                        std::uint32_t next_rows) {
  return std::uint64_t{next_rows / 16} << 32 | (next_columns / 16 << 16 | (tile & 0x3FFFF) / 16);
}
// Of a statistic that ones add. Zeros meet the shifts, which are finite.
[[nodiscard]] __device__ __forceinline__ std::uint64_t shift_operand(std::uint32_t stats) {
  return plain_descriptor(stats + offsetof(StatsColumns, shift), 0, 8 * 16);
}
[[nodiscard]] __device__ __forceinline__ std::uint64_t minus_d_operand(std::uint32_t stats) {
  return plain_descriptor(stats, offsetof(StatsColumns, shift), 8 * 16);
}

// 0, which the compiler does not know: else it would keep every descriptor of K and V in registers all along.
[[nodiscard]] __device__ __forceinline__ unsigned opaque_zero(int n) { return static_cast<unsigned>(n) >> 20; }

// The ones that add a statistic of the queries to all keys' sums (prepare/stats_columns.cuh), as left operand: sum =
// the statistic.
class RegisterOnes {
 public:
  __device__ __forceinline__ explicit RegisterOnes(std::uint32_t /*tile*/) {
    left_[0] = left_[1] = stats_ones(threadIdx.x % 4);
  }
  __device__ __forceinline__ void multiply(float (&sum)[32], std::uint64_t right, unsigned /*opaque_zero*/) const {
    ptx::wgmma<ptx::Major::k>(sum, left_, right, false, __nv_bfloat16{});
  }

 private:
  std::uint32_t left_[4] = {};
};

// By a warp, before a fence for the async proxy.
__device__ inline void store_ones(OnesTile& to) {
  const unsigned row = threadIdx.x % 32 / 4;
  const unsigned pair = threadIdx.x % 4;
  to.ones[row][pair] = stats_ones(pair);
  to.zeros[row][pair] = 0;
}

class SharedOnes {
 public:
  // tile: OnesTile.
  __device__ __forceinline__ explicit SharedOnes(std::uint32_t tile) : left_(tile) {}
  __device__ __forceinline__ void multiply(float (&sum)[32], std::uint64_t right, unsigned opaque_zero) const {
    const std::uint64_t left = plain_descriptor(left_ + opaque_zero, offsetof(OnesTile, zeros), 0);
    ptx::wgmma<ptx::Major::k, ptx::Major::k>(sum, left, right, false, __nv_bfloat16{});
  }

 private:
  std::uint32_t left_;
};

// Starts S^T = K Q^T or dP^T = V dO^T for 64 keys and a tile of 64 queries, with a statistic of the queries added.
template <class T, class P, class Left, class Ones>
__device__ __forceinline__ void issue_transposed_scores(float (&s)[32], const Left& keys, std::uint32_t tile,
                                                        unsigned zero, const Ones& ones, std::uint64_t statistic) {
  const SharedOperand<P> queries(tile);
  ptx::wgmma_fence();
  ones.multiply(s, statistic, zero);
#pragma unroll
  for (int step = 0; step < P::kColumns / 16; ++step) {
    keys.template multiply<T>(s, step, queries.k_major(0, step), zero, true);
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
