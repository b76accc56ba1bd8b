// SPDX-License-Identifier: Apache-2.0
// The vocabulary of the tensor-core kernels: swizzled tiles in shared memory.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/ptx.cuh"
#include "distr/problem.h"

namespace distr::cuda {

inline constexpr int kChunk = 8;  // 16-bit elements in 16 bytes, the unit of every copy

template <class T>
inline constexpr DType kDTypeOf = DType::f32;
template <>
inline constexpr DType kDTypeOf<__half> = DType::f16;
template <>
inline constexpr DType kDTypeOf<__nv_bfloat16> = DType::bf16;

// A tile [rows][kColumns] of 16-bit elements in shared memory. The chunks of a row are permuted by the row's number, so
// that the eight rows which ldmatrix reads at once lie in different banks.
template <int kColumns>
struct Tile {
  static constexpr int kChunks = kColumns / kChunk;  // of a row
  static_assert(std::has_single_bit(static_cast<unsigned>(kChunks)));

  std::uint32_t base;  // a multiple of 1024

  [[nodiscard]] __device__ static constexpr int offset(int row, int chunk) {
    constexpr int kRowsABank = kChunks >= 8 ? 1 : 8 / kChunks;  // rows that share the 32 banks
    constexpr int kMix = kChunks >= 8 ? 7 : kChunks - 1;
    return (row * kChunks + (chunk ^ ((row / kRowsABank) & kMix))) * 16;  // bytes
  }
  [[nodiscard]] __device__ std::uint32_t at(int row, int chunk) const {
    return base + static_cast<std::uint32_t>(offset(row, chunk));
  }
  // From the address of (row, chunk) to that of (row + rows, chunk ^ chunks), where rows does not change the swizzle,
  // or `chunks` has what it changes. One instruction, where at() would keep a register for each. With multiples of 8
  // and 2, from chunks below 2, that is (row + rows, chunk + chunks).
  [[nodiscard]] __device__ static constexpr std::uint32_t move(std::uint32_t address, int rows, int chunks) {
    return (address ^ static_cast<std::uint32_t>(chunks * 16)) + static_cast<std::uint32_t>(rows * kChunks * 16);
  }
};

// The same bits as another type of the same size (CUDA's pairs are not what std::bit_cast takes).
template <class To, class From>
[[nodiscard]] __device__ inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Writes row[column] and row[column + 1], as far as there are so many columns. pairs: in one word where both are, for
// the address of the row is a multiple of 4, and the column is even.
template <class T>
__device__ __forceinline__ void store_pair(T* row, int column, int columns, bool pairs, float low, float high) {
  if (pairs && column + 1 < columns) {
    *reinterpret_cast<std::uint32_t*>(row + column) = ptx::pack(low, high, T{});
    return;
  }
  if (column < columns) {
    row[column] = T(low);
  }
  if (column + 1 < columns) {
    row[column + 1] = T(high);
  }
}

// Of a matrix of 4 x 4 words, whose rows four lanes have, a row each: the columns instead. The lane is computed anew,
// as is store_row's: registers are scarce.
[[nodiscard]] __device__ __forceinline__ uint4 transpose_in_quad(uint4 row) {
  const auto exchange = [](std::uint32_t& low, std::uint32_t& high, unsigned lanes) {
    const bool is_high = (ptx::opaque(threadIdx.x) & lanes) != 0;
    const std::uint32_t other = __shfl_xor_sync(~0U, is_high ? low : high, static_cast<int>(lanes));
    (is_high ? low : high) = other;
  };
  exchange(row.x, row.y, 1);
  exchange(row.z, row.w, 1);
  exchange(row.x, row.z, 2);
  exchange(row.y, row.w, 2);
  return row;
}

// How many elements of a row may be written at once, in rows so far apart: 8, 2 or 1.
template <class T>
[[nodiscard]] __device__ inline int elements_at_once(const T* base, std::int64_t stride) {
  const auto fits = [&](unsigned elements) {
    return reinterpret_cast<std::uintptr_t>(base) % (elements * sizeof(T)) == 0 && stride % elements == 0;
  };
  return fits(8) ? 8 : fits(2) ? 2 : 1;
}

// Writes what a lane has of a row of a wgmma or mma accumulator: pair(n) at the columns 8 n + 2 (lane % 4) and behind
// it, kColumns in all, as far as there are so many columns. A row that is not there is not written, but its lanes must
// come here as well, with the others of their warp. at_once: the same for all of them.
template <int kColumns, class T, class Pair>
__device__ __forceinline__ void store_row(T* row, bool is_there, int columns, int at_once, const Pair& pair) {
  static_assert(kColumns % 32 == 0);
  const int lane = static_cast<int>(ptx::opaque(threadIdx.x)) % 4;
  if (at_once == 8 && columns == kColumns) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 4) {  // columns of four times 8: a lane gets all of one of them
      const auto packed = [&](int m) { return ptx::pack(pair(n + m).x, pair(n + m).y, T{}); };
      const uint4 eight = transpose_in_quad({packed(0), packed(1), packed(2), packed(3)});
      if (is_there) {
        *reinterpret_cast<uint4*>(row + (n + lane) * 8) = eight;
      }
    }
    return;
  }
  if (!is_there) {
    return;
  }
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    const float2 two = pair(n);
    store_pair(row, n * 8 + lane * 2, columns, at_once > 1, two.x, two.y);
  }
}

// The largest and the sum over the four lanes that share a row of an mma accumulator.
[[nodiscard]] __device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 2));
}
[[nodiscard]] __device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}

// Natural logarithm of the sum of e^S, where total = sum of 2^(log2(e) S - reference).
[[nodiscard]] __device__ inline float natural_lse(float reference, float total) {
  constexpr float kLn2 = 0.6931471805599453F;
  return total == 0.0F ? -INFINITY : kLn2 * (reference + log2f(total));
}

}  // namespace distr::cuda
