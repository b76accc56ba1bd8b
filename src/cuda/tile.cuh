// SPDX-License-Identifier: Apache-2.0
// What the tensor-core kernels share: swizzled tiles in shared memory, and stores of accumulator rows.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/ptx.cuh"
#include "distr/problem.h"

namespace distr::cuda {

inline constexpr int kChunk = 8;  // 16-bit elements in 16 bytes, which is the unit of every copy

template <class T>
inline constexpr DType kDTypeOf = DType::f32;
template <>
inline constexpr DType kDTypeOf<__half> = DType::f16;
template <>
inline constexpr DType kDTypeOf<__nv_bfloat16> = DType::bf16;

// A tile [rows][kColumns] of 16-bit elements in shared memory. The row's number permutes the chunks of the row (a
// swizzle), so that the eight rows which ldmatrix reads at once lie in different banks.
template <int kColumns>
struct Tile {
  static constexpr int kChunks = kColumns / kChunk;  // of a row
  static_assert(std::has_single_bit(static_cast<unsigned>(kChunks)));

  std::uint32_t base;  // a multiple of 1024

  [[nodiscard]] __device__ static constexpr int offset(int row, int chunk) {
    constexpr int kRowsPerBankCycle = kChunks >= 8 ? 1 : 8 / kChunks;  // rows that share the 32 banks
    constexpr int kMix = kChunks >= 8 ? 7 : kChunks - 1;
    return (row * kChunks + (chunk ^ ((row / kRowsPerBankCycle) & kMix))) * 16;  // bytes
  }
  [[nodiscard]] __device__ std::uint32_t at(int row, int chunk) const {
    return base + static_cast<std::uint32_t>(offset(row, chunk));
  }
  // Goes from the address of (row, chunk) to that of (row + rows, chunk ^ chunks). Either `rows` must not change the
  // swizzle, or `chunks` must contain the change. This takes one instruction, where at() would keep a register for each
  // address. If `rows` is a multiple of 8, `chunks` is even and the chunk is 0 or 1, it is (row + rows, chunk +
  // chunks).
  [[nodiscard]] __device__ static constexpr std::uint32_t move(std::uint32_t address, int rows, int chunks) {
    return (address ^ static_cast<std::uint32_t>(chunks * 16)) + static_cast<std::uint32_t>(rows * kChunks * 16);
  }
};

// Reinterprets the bits of a value as another type of the same size. std::bit_cast does not take CUDA's pair types.
template <class To, class From>
[[nodiscard]] __device__ inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Writes row[column] and row[column + 1], as far as the row has these columns. With `pairs` both are written as one
// word; the row's address is then a multiple of 4, and `column` is even.
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

// Transposes a matrix of 4 x 4 words that four lanes hold: a lane gives its row and gets its column. Registers are
// scarce, so the lane is computed again here and in store_row().
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

// How many elements of a row one store may write (8, 2 or 1), where rows are `stride` elements apart.
template <class T>
[[nodiscard]] __device__ inline int vector_width(const T* base, std::int64_t stride) {
  const auto fits = [&](unsigned elements) {
    return reinterpret_cast<std::uintptr_t>(base) % (elements * sizeof(T)) == 0 && stride % elements == 0;
  };
  return fits(8) ? 8 : fits(2) ? 2 : 1;
}

// Writes a lane's part of a row of a wgmma or mma accumulator with kColumns columns: pair(n) goes to the columns
// 8 n + 2 (lane % 4) and the next, as far as the row has these columns. Nothing is written where `is_valid` is false,
// but all lanes of the warp must call the function, and with the same `width`.
template <int kColumns, class T, class Pair>
__device__ __forceinline__ void store_row(T* row, bool is_valid, int columns, int width, const Pair& pair) {
  static_assert(kColumns % 32 == 0);
  const int lane = static_cast<int>(ptx::opaque(threadIdx.x)) % 4;
  if (width == 8 && columns == kColumns) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 4) {  // of 4 x 8 columns each lane gets 8 neighbours
      const auto packed = [&](int m) { return ptx::pack(pair(n + m).x, pair(n + m).y, T{}); };
      const uint4 eight = transpose_in_quad({packed(0), packed(1), packed(2), packed(3)});
      if (is_valid) {
        *reinterpret_cast<uint4*>(row + (n + lane) * 8) = eight;
      }
    }
    return;
  }
  if (!is_valid) {
    return;
  }
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    const float2 two = pair(n);
    store_pair(row, n * 8 + lane * 2, columns, width > 1, two.x, two.y);
  }
}

// The maximum and the sum over the four lanes that share a row of an mma accumulator.
[[nodiscard]] __device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 2));
}
[[nodiscard]] __device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}

// The natural logarithm of the sum of e^S, from row_sum = the sum of 2^(log2(e) S - row_max).
[[nodiscard]] __device__ inline float natural_lse(float row_max, float row_sum) {
  constexpr float kLn2 = 0.6931471805599453F;
  return row_sum == 0.0F ? -INFINITY : kLn2 * (row_max + log2f(row_sum));
}

}  // namespace distr::cuda
