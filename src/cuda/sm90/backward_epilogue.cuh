// SPDX-License-Identifier: Apache-2.0
// What the backward does with the accumulators of wgmma, which hold a row lane / 4 (+ 8) of a warp's 16 and the columns
// 8 n + 2 (lane % 4) (+ 1): P and dS of S^T and dP^T, and where sums go.
#pragma once

#include <climits>
#include <cmath>
#include <cstddef>

#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_convert.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {

// x = value where a query, a column from `row` on, does not see a key, a row from `key` on.
template <class C, class Rows>
__device__ __forceinline__ void hide(float (&x)[32], const Rows& of, int key, int row, float value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_row = key + half * 8 + lane / 4;
    // The first column that sees it.
    const int first = of_row >= static_cast<int>(of.seq_k) ? INT_MAX
                      : of.causal                          ? of_row - row - static_cast<int>(of.causal_offset)
                                                           : INT_MIN;
    // The last one.
    const int last = has_left_end(of) ? of_row - row - static_cast<int>(of.first_offset) : INT_MAX;
#pragma unroll
    for (int n = 0; n < C::kRows / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& element = x[n * 4 + half * 2 + i];
        const int column = n * 8 + lane % 4 * 2 + i;
        element = column < first || column > last ? value : element;
      }
    }
  }
}

// P^T = 2^(scale S^T - LSE), of sums that have LSE in them.
__device__ __forceinline__ void exponentials(float (&s)[32], float scale) {
#pragma unroll
  for (float& x : s) {
    x = ptx::exp2(x * scale);
  }
}

// The same of capped scores, which are without LSE: P^T becomes an operand, and s the factor of dS^T that it is, P^T
// times the slope of the cap, 1 - tanh^2 (method, 4). A hidden score gives NaN, where dS^T is hidden too. stats: the
// tile's StatsColumns, in shared memory.
template <class T>
__device__ __forceinline__ void capped_exponentials(float (&s)[32], std::uint32_t (&operand)[4][4], std::uint32_t stats,
                                                    float scale, float inverse_cap) {
  const std::uint32_t idle_columns = stats + offsetof(StatsColumns, shift) + 8;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const std::uint32_t columns = idle_columns + (static_cast<unsigned>(n) * 8 + threadIdx.x % 4 * 2) * 16;
    const float shift[2] = {sum_columns(ptx::load_shared_8(columns)), sum_columns(ptx::load_shared_8(columns + 16))};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = n * 4 + half * 2;
      float p[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float tanh = s[i + j] * inverse_cap;
        p[j] = ptx::exp2((s[i + j] + shift[j]) * scale);
        s[i + j] = p[j] * fmaf(-tanh, tanh, 1.0F);
      }
      operand[i / 8][i / 2 % 4] = ptx::pack(p[0], p[1], T{});
    }
  }
}

// The columns of dQ that a panel of K has to shared memory, in fragments: 512 contiguous bytes at a time.
template <class C>
__device__ __forceinline__ void store_dq_panel(const float (&d_q)[C::KeyTile::kPanelColumns / 2], std::uint32_t tile,
                                               int panel) {
  constexpr int kOwn = C::KeyTile::kPanelColumns / 8;  // fragments beside each other
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
  const std::uint32_t to =
      tile + static_cast<std::uint32_t>((warp * C::KeyTile::kCount + panel) * kOwn * kFragment * 4 + lane * 16);
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    ptx::store_shared_16(to + static_cast<std::uint32_t>(n * kFragment * 4),
                         {__float_as_uint(d_q[4 * n]), __float_as_uint(d_q[4 * n + 1]), __float_as_uint(d_q[4 * n + 2]),
                          __float_as_uint(d_q[4 * n + 3])});
  }
}

// Waits until so many blocks have added to the tile. Traps after many polls: a mistake must not hang the device.
__device__ inline void wait_for_semaphore(const unsigned* dq_semaphore, unsigned number) {
  constexpr unsigned kMaxPolls = 1U << 26;
#pragma unroll 1
  for (unsigned poll = 0; poll < kMaxPolls; ++poll) {
    if (ptx::load_acquire(dq_semaphore) == number) {
      return;
    }
  }
  __trap();
}

// Where a block's dK and dV go.
struct KeyPlace {
  int batch, head_kv;
  int first_key, keys;  // in dK and dV, and how many there are
  std::int64_t part;    // key 0's row in the parts of all heads, or of all pieces
  bool is_piece;        // of a split block
};

// Sums of this warp's 16 keys, as fragments. kSums: of a thread, half of the columns.
template <int kSums>
__device__ inline void store_fragments(float* to, const float (&sum)[kSums]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kSums / 4; ++n) {
    *reinterpret_cast<float4*>(to + n * kFragment + lane * 4) =
        make_float4(sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]);
  }
}

// The same, of keys from `row` on, times a factor, to a tensor of so many columns.
template <class T, int kSums>
__device__ inline void store_rows(const KeyPlace& place, int row, const float (&sum)[kSums], T* to,
                                  const Strides& strides, int columns, float factor) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* const base = to + place.batch * strides.batch + place.head_kv * strides.head + place.first_key * strides.row;
  const int width = vector_width(base, strides.row);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t of_row = row + half * 8 + lane / 4;
    store_row<2 * kSums>(base + of_row * strides.row, of_row < place.keys, columns, width, [&](int n) {
      return make_float2(factor * sum[n * 4 + half * 2], factor * sum[n * 4 + half * 2 + 1]);
    });
  }
}

// dK or dV of this warp's 16 keys from `row` on: what is wanted, or the parts of a query head.
template <class T, int kSums>
__device__ inline void store_keys(const KeyPlace& place, int row, const float (&sum)[kSums], float* parts, void* to,
                                  const Strides& strides, int columns, float factor) {
  if (parts != nullptr) {
    store_fragments(parts + (place.part + row) * (2 * kSums), sum);
  } else {
    store_rows(place, row, sum, static_cast<T*>(to), strides, columns, factor);
  }
}

// To the sums over far keys what near ones found of dV of a warp's 16 keys from `row` on, a sink's pieces in their
// order. head: of all batches; number: of the block of keys.
template <class C>
__device__ __forceinline__ void add_near_values(const BackwardParameters& p, std::int64_t head, int number, int row,
                                                float (&d_v)[C::kValues / 2]) {
  const SplitKeys& split = p.near_split;
  const bool is_split = split.pieces > 1 && number < static_cast<int>(split.sinks);
  const unsigned pieces = is_split ? split.pieces : 1;
  const std::int64_t first =
      is_split ? (head * split.sinks + number) * pieces * C::kKeys + row % C::kKeys : head * p.key_rows + row;
  const float* from = (is_split ? split.d_v : p.near_d_v) + first * p.near_values + threadIdx.x % 32 * 4;
#pragma unroll 1
  for (unsigned piece = 0; piece < pieces; ++piece) {
#pragma unroll
    for (int n = 0; n < C::kValues / 8; ++n) {  // loads on their way at the same time
      const float4 x = *reinterpret_cast<const float4*>(from + n * kFragment);
      d_v[4 * n] += x.x;
      d_v[4 * n + 1] += x.y;
      d_v[4 * n + 2] += x.z;
      d_v[4 * n + 3] += x.w;
    }
    from += std::int64_t{C::kKeys} * p.near_values;
  }
}

}  // namespace distr::cuda::sm90
