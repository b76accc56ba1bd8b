// SPDX-License-Identifier: Apache-2.0
// Sums of columns of K (eq. 4), two keys in a word. A sum is rounded once, as in the plain implementation: with a
// rounding after each addition LSE errs more than the tolerance allows (bench/roundings.py).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/tile.cuh"

namespace distr::cuda::sm80 {

// The words of a column that a thread loads at once.
template <int kWords>
struct Words {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  std::uint32_t of[kWords];

  [[nodiscard]] __device__ static Words load(std::uint32_t shared) {
    if constexpr (kWords == 4) {
      return bits<Words>(ptx::load_shared_16(shared));
    } else if constexpr (kWords == 2) {
      return bits<Words>(ptx::load_shared_8(shared));
    } else {
      return {ptx::load_shared_4(shared)};
    }
  }
  __device__ void store(std::uint32_t shared) const {
    if constexpr (kWords == 4) {
      ptx::store_shared_16(shared, bits<uint4>(*this));
    } else if constexpr (kWords == 2) {
      ptx::store_shared_8(shared, bits<uint2>(*this));
    } else {
      ptx::store_shared_4(shared, of[0]);
    }
  }
};

template <class T>
struct Pair;
template <>
struct Pair<__half> {
  using Type = __half2;
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// Both elements of a word as fp32.
template <class T>
[[nodiscard]] __device__ inline float2 unpack(std::uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(bits<__half2>(word));
  } else {  // __bfloat1622float2 would take one instruction more
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
  }
}

template <class T, int kMembers>
[[nodiscard]] __device__ inline std::uint32_t sum(const std::uint32_t (&members)[kMembers]) {
  using P = typename Pair<T>::Type;
  if constexpr (kMembers == 2) {  // a single addition rounds once
    return bits<std::uint32_t>(__hadd2(bits<P>(members[0]), bits<P>(members[1])));
  } else {
    float2 total = unpack<T>(members[0]);
#pragma unroll
    for (int i = 1; i < kMembers; ++i) {
      const float2 member = unpack<T>(members[i]);
      total = {total.x + member.x, total.y + member.y};
    }
    return ptx::pack(total.x, total.y, T{});
  }
}

}  // namespace distr::cuda::sm80
