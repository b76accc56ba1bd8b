// SPDX-License-Identifier: Apache-2.0
// Rows' statistics as columns of a tensor core's operand: an fp32 is the sum of three bf16, so three columns, beside
// ones on the other side, add it to a row of scores.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace distr::cuda {

inline constexpr int kStatsTile = 64;

// Of a tile of rows. A row has eight columns of each statistic, of which ones meet three, and zeros the rest.
struct StatsColumns {
  uint4 minus_d[kStatsTile];
  uint4 shift[kStatsTile];  // -LSE in units of the scores, which the softmax's scale multiplies
};

// The shift of a row that takes no part, the lowest of bf16: P = 2^(scale (S + shift)) is 0 for every scale that a
// kernel takes and every finite S.
inline constexpr float kHidingShift = -0x1.FEp127F;
// Scales for which the shifts of all rows that take part are finite, and the one above hides.
inline constexpr double kMinShiftScale = 1e-20, kMaxShiftScale = 1e20;

// Three columns of bf16, and a fourth that is 0.
[[nodiscard]] __device__ inline uint2 split_columns(float x) {
  const auto bits = [](__nv_bfloat16 part) { return std::uint32_t{__bfloat16_as_ushort(part)}; };
  const __nv_bfloat16 high = __float2bfloat16_rn(x);
  const float rest = isfinite(__bfloat162float(high)) ? x - __bfloat162float(high) : 0.0F;
  const __nv_bfloat16 middle = __float2bfloat16_rn(rest);
  const __nv_bfloat16 low = __float2bfloat16_rn(rest - __bfloat162float(middle));
  return make_uint2(bits(high) | bits(middle) << 16, bits(low));
}

[[nodiscard]] __device__ inline float sum_columns(uint2 columns) {
  return __uint_as_float(columns.x << 16) +
         (__uint_as_float(columns.x & 0xFFFF0000U) + __uint_as_float(columns.y << 16));
}

// All columns of a statistic that ones add to the scores.
[[nodiscard]] __device__ inline uint4 met_columns(float x) {
  const uint2 columns = split_columns(x);
  return make_uint4(columns.x, columns.y, 0, 0);
}
// Those of one that is met by zeros, for kernels that add it by themselves.
[[nodiscard]] __device__ inline uint4 idle_columns(float x) {
  const uint2 columns = split_columns(x);
  return make_uint4(0, 0, columns.x, columns.y);
}

// What meets them: columns 2 pair and 2 pair + 1 of a row of ones and zeros, which begins again every eight columns.
[[nodiscard]] __device__ inline std::uint32_t stats_ones(unsigned pair) {
  constexpr std::uint32_t kOne = 0x3F80;  // in bf16
  return pair == 0 ? kOne << 16 | kOne : pair == 1 ? kOne : 0;
}

}  // namespace distr::cuda
