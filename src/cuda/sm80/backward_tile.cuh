// SPDX-License-Identifier: Apache-2.0
// The functions that the two backward kernels share: masks, P and dS, products of fragments.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/backward_scheduler.cuh"
#include "cuda/sm80/backward_config.h"
#include "cuda/sm80/queries.cuh"
#include "cuda/sm80/softmax.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm80 {

// acc[m][2 n], acc[m][2 n + 1] += A B for the 16 rows of each tile of A and 16 columns of B.
template <class T, int kTiles, int kN>
__device__ __forceinline__ void multiply(float (&acc)[kTiles][kN][4], const std::uint32_t (&a)[kTiles][4],
                                         const std::uint32_t (&b)[4], int n) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    ptx::mma_16x8x16(acc[m][2 * n], a[m], b[0], b[1], T{});
    ptx::mma_16x8x16(acc[m][2 * n + 1], a[m], b[2], b[3], T{});
  }
}

// acc [16 kTiles, 16 kN / 2] += A B. B is 16 rows in shared memory; `start` is this lane's address of them for
// ldmatrix_x4_trans.
template <class T, int kDim, int kTiles, int kN>
__device__ __forceinline__ void accumulate_rows(float (&acc)[kTiles][kN][4], const std::uint32_t (&a)[kTiles][4],
                                                std::uint32_t start) {
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) {
    std::uint32_t b[4];
    ptx::ldmatrix_x4_trans(b, Tile<kDim>::move(start, 0, n * 2));
    multiply<T>(acc, a, b, n);
  }
}

// Takes an element out of the sums where its query does not see its key. `gradient` is its dO V^T.
__device__ __forceinline__ void hide(float& score, float& gradient, bool hidden) {
  score = hidden ? -INFINITY : score;
  gradient = hidden ? 0.0F : gradient;
}

// The score, as a logarithm to the base 2, with the mask tensor applied; -inf where the mask hides the key.
[[nodiscard]] __device__ inline float under_mask(const DeviceProblem& problem, float score, int batch, int head,
                                                 int row, int key) {
  constexpr float kLog2E = 1.4426950408889634F;
  const DeviceMask& mask = problem.mask;
  if (row >= problem.seq_q || key >= problem.seq_k) {
    return -INFINITY;
  }
  return masked(score, mask, batch * mask.batch + head * mask.head + row * mask.row + key * mask.key, kLog2E);
}

// Caps a score, q_hat k_hat^T, which becomes a logarithm to the base 2; its dP becomes the rest of dS, (dP - D) times
// the cap's slope.
__device__ __forceinline__ void cap(const DeviceProblem& problem, float& score, float& gradient, float d) {
  const float t = tanh_of(score * problem.scale_log2, problem.softcap);
  score = capped(t, problem.softcap);
  gradient = (gradient - d) * fmaf(-t, t, 1.0F);
}

// Turns s into P = 2^(scale s + shift), and dp = dO V^T into dS = P (dp - d). Under a mask dS is 0 where P is 0, even
// if V is infinite or NaN there.
template <class C>
__device__ __forceinline__ void differentiate(float& s, float& dp, float scale, float shift, float d) {
  s = ptx::exp2(fmaf(s, scale, shift));
  dp = C::kMasks && s == 0 ? 0.0F : s * (dp - d);
}

// Rounds an accumulator tile of 16 x 16 into the left operand of the next product.
template <class T>
__device__ __forceinline__ void as_operand(std::uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = ptx::pack(low[0], low[1], T{});
  a[1] = ptx::pack(low[2], low[3], T{});
  a[2] = ptx::pack(high[0], high[1], T{});
  a[3] = ptx::pack(high[2], high[3], T{});
}

// Writes factor * acc to the tensor `to` [rows, columns], where this warp's part begins at (row, column).
template <class T, int kTiles, int kN>
__device__ inline void store_rows(T* to, std::int64_t stride, std::int64_t row, std::int64_t rows, int column,
                                  int columns, float factor, const float (&acc)[kTiles][kN][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool pairs = reinterpret_cast<std::uintptr_t>(to) % 4 == 0 && stride % 2 == 0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t of_row = row + tile * 16 + half * 8 + lane / 4;
      if (of_row >= rows) {
        continue;
      }
      T* const line = to + of_row * stride;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int c = column + n * 8 + lane % 4 * 2;
        const float low = factor * acc[tile][n][half * 2];
        const float high = factor * acc[tile][n][half * 2 + 1];
        if (pairs && c + 1 < columns) {
          *reinterpret_cast<std::uint32_t*>(line + c) = ptx::pack(low, high, T{});
        } else {
          if (c < columns) {
            line[c] = T(low);
          }
          if (c + 1 < columns) {
            line[c + 1] = T(high);
          }
        }
      }
    }
  }
}

}  // namespace distr::cuda::sm80
