// SPDX-License-Identifier: Apache-2.0
// The online softmax over tiles of scores in the layout of the mma's accumulators, and the masks before it.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/sm80/config.h"
#include "cuda/sm80/storage.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm80 {

// Whether a kernel serves q_hat with the scale in it (ForwardParameters::scale_in_queries).
template <class C>
inline constexpr bool kScalesQueries = !C::kExact && std::is_same_v<typename C::Element, __nv_bfloat16>;

// Whether a kernel that serves it makes exponents of all scores beforehand where the scale is not in q_hat, so that its
// exponentials are always of exponents. Wider kernels take exponentials of scores, and with the scale in q_hat those of
// a plain tile's first part alone are of exponents: the second part's scores are then computed under them
// (docs/kernel-log.md, sm80/forward, step 36).
template <class C>
inline constexpr bool kMakesExponents = C::kDim <= 64 && kScalesQueries<C>;
enum class ExponentialsOf : std::uint8_t { scores, exponents };

template <class C>
[[nodiscard]] __device__ inline bool scale_in_queries(const ForwardParameters& p) {
  return kScalesQueries<C> && p.scale_in_queries;
}

// The largest of this lane's scores of each of its rows. larger(x, y) says what becomes of NaN.
template <class C, class Larger>
__device__ __forceinline__ void maxima_of(float (&maxima)[C::kRowTiles][2], const ScoreFragment<C> (&s)[C::kParts],
                                          const Larger& larger) {
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -INFINITY;
#pragma unroll
      for (const ScoreFragment<C>& part : s) {
#pragma unroll
        for (int n = 0; n < C::kPartKeys / 8; ++n) {
          largest = larger(largest, larger(part.of[tile][n][half * 2], part.of[tile][n][half * 2 + 1]));
        }
      }
      maxima[tile][half] = largest;
    }
  }
}

// P = 2^(scale * S - row_max). The row max is that of the first tile, scaled, and then one of two:
//   online: it follows the scores of later tiles, but only when they have grown by kRescaleThreshold, so that O is
//   hardly
//     ever rescaled. P stays below 2^kRescaleThreshold, which neither its type nor the sums in fp32 mind.
//   fixed: it costs no more maxima. That does for rows whose scores are not far above it, and where it is not so large
//     that the rounding of scale * max S moves P: rows_in_range().
// Where q_hat has the scale in it P = 2^S: the row max is 0, and fixed from the first tile on.
// Where it is online in all tiles the scores are scaled beforehand, and `scale` is 1: then both are rounded alike, and
// the subtraction has no rounding where it matters.
template <class C>
struct Softmax {
  static constexpr float kRescaleThreshold = 8.0F;
  static constexpr float kMaxSum = 0x1p64F;
  static constexpr float kMinSum = 0x1p-32F;    // without a row max
  static constexpr float kMaxRowMax = 0x1p20F;  // of a fixed one: it is rounded by 1/32 at most
  static constexpr float kNoRowMax = -FLT_MAX;  // of a row that has seen no key yet

  float scale;  // of the scores as update_row_max() gets them, to logarithms to the base 2; positive
  float row_max[C::kRowTiles][2];
  float row_sum[C::kRowTiles][2] = {};  // of this lane's part of the rows

  __device__ explicit Softmax(float scale_log2, float first = kNoRowMax) : scale(scale_log2) {
#pragma unroll
    for (auto& tile : row_max) {
      tile[0] = tile[1] = first;
    }
  }

  [[nodiscard]] __device__ static float exponential(float exponent) {
    return C::Stages::exponential(exponent, [](float x) { return ptx::exp2(x); });
  }

  // Takes the scores of a tile into the row max; rescales O and the row sum where it changes.
  __device__ void update_row_max(const ScoreFragment<C> (&s)[C::kParts], float (&o)[C::kRowTiles][C::kDim / 8][4]) {
    float maxima[C::kRowTiles][2];
    maxima_of<C>(maxima, s, [](float x, float y) { return fmaxf(x, y); });
    update_row_max(maxima, o);
  }

  // The same, of this lane's largest scores of each row.
  __device__ void update_row_max(const float (&maxima)[C::kRowTiles][2], float (&o)[C::kRowTiles][C::kDim / 8][4]) {
    float tile_max[C::kRowTiles][2];
    bool any_rescales = false;
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        tile_max[tile][half] = quad_max(maxima[tile][half]) * scale;
        any_rescales |= needs_rescale(tile_max, tile, half);
      }
    }
    if (__any_sync(~0U, any_rescales)) {
      rescale(tile_max, o);
    }
  }

  // Makes the exponents of P of a tile's scores.
  __device__ void make_exponents(ScoreFragment<C> (&s)[C::kParts]) const {
    if constexpr (kMakesExponents<C>) {
#pragma unroll
      for (ScoreFragment<C>& part : s) {
#pragma unroll
        for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
          for (auto& scores : part.of[tile]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              scores[i] = fmaf(scores[i], scale, -row_max[tile][i / 2]);
            }
          }
        }
      }
    }
  }

  // P of scores or exponents s, as the left operand of the second product.
  template <ExponentialsOf kOf = kMakesExponents<C> ? ExponentialsOf::exponents : ExponentialsOf::scores>
  __device__ void exponentials(const ScoreFragment<C>& s,
                               std::uint32_t (&probabilities)[C::kPartKeys / 16][C::kRowTiles][4]) {
#pragma unroll
    for (int n = 0; n < C::kPartKeys / 8; ++n) {
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto exponent = [&](float score) {
            return kOf == ExponentialsOf::exponents ? score : fmaf(score, scale, -row_max[tile][half]);
          };
          const float low = exponential(exponent(s.of[tile][n][half * 2]));
          const float high = exponential(exponent(s.of[tile][n][half * 2 + 1]));
          row_sum[tile][half] += low + high;
          probabilities[n / 2][tile][n % 2 * 2 + half] = ptx::pack(low, high, typename C::Element{});
        }
      }
    }
  }

  [[nodiscard]] __device__ bool needs_rescale(const float (&tile_max)[C::kRowTiles][2], int tile, int half) const {
    return tile_max[tile][half] - row_max[tile][half] > kRescaleThreshold;
  }

  __device__ void rescale(const float (&tile_max)[C::kRowTiles][2], float (&o)[C::kRowTiles][C::kDim / 8][4]) {
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row is rescaled for its own sake alone: its bits must not depend on the rows beside it, which may be later
        // ones.
        const float next = needs_rescale(tile_max, tile, half) ? tile_max[tile][half] : row_max[tile][half];
        const float factor = ptx::exp2(row_max[tile][half] - next);
        row_max[tile][half] = next;
        row_sum[tile][half] *= factor;
#pragma unroll
        for (int n = 0; n < C::kDim / 8; ++n) {
          o[tile][n][half * 2] *= factor;
          o[tile][n][half * 2 + 1] *= factor;
        }
      }
    }
  }
};

// Tiles whose scores are neither hidden nor biased, before the first that are.
template <class C>
[[nodiscard]] __device__ inline int unmasked_tiles(const ForwardParameters& p, const Work& work) {
  if (C::kMasks && p.problem.mask.kind != MaskKind::none) {
    return 0;
  }
  std::int64_t keys = p.problem.seq_k;
  if (p.problem.causal) {
    keys = min(keys, max(query_of<C>(p, work.row) + p.problem.causal_offset + 1, std::int64_t{0}));
  }
  return static_cast<int>(keys / C::kKeys);
}

// The first tile all of whose keys come no earlier than the left end of a sliding window, for all rows.
template <class C>
[[nodiscard]] __device__ inline int first_whole_tile(const DeviceProblem& problem, const Work& work) {
  if (!C::kMasks || !has_left_end(problem)) {
    return 0;
  }
  return static_cast<int>((first_visible_key(problem, work.row + C::kRows - 1) + C::kKeys - 1) / C::kKeys);
}

// To fp32, where only -inf becomes -inf.
[[nodiscard]] __device__ inline float rounded(double bias) {
  return bias == -static_cast<double>(INFINITY) ? -INFINITY : static_cast<float>(fmax(bias, -double{FLT_MAX}));
}

// A score and what the mask adds to it: -inf hides the key, and a finite bias hides nothing. `unit` is the scores'
// unit.
[[nodiscard]] __device__ inline float masked(float score, const DeviceMask& mask, std::int64_t index, float unit) {
  if (mask.kind == MaskKind::boolean) {
    return static_cast<const std::uint8_t*>(mask.data)[index] != 0 ? score : -INFINITY;
  }
  float bias = 0;
  switch (mask.dtype) {
    case DType::f16:
      bias = __half2float(static_cast<const __half*>(mask.data)[index]);
      break;
    case DType::bf16:
      bias = __bfloat162float(static_cast<const __nv_bfloat16*>(mask.data)[index]);
      break;
    case DType::f32:
      bias = static_cast<const float*>(mask.data)[index];
      break;
    case DType::f64:
      bias = rounded(static_cast<const double*>(mask.data)[index]);
      break;
  }
  if (bias == -INFINITY) {
    return -INFINITY;
  }
  const float sum = score + fmaxf(bias * unit, -FLT_MAX);
  const float lowest = score < -FLT_MAX ? score : -FLT_MAX;
  return sum < lowest ? lowest : sum;  // NaN stays NaN
}

// To logarithms to the base 2.
template <class C>
__device__ __forceinline__ void scale_scores(ScoreFragment<C>& s, float scale) {
#pragma unroll
  for (auto& tile : s.of) {
#pragma unroll
    for (auto& fragment : tile) {
#pragma unroll
      for (float& score : fragment) {
        score *= scale;
      }
    }
  }
}

// tanh(score / softcap) of a score as a logarithm to the base 2, and of that the capped score.
[[nodiscard]] __device__ __forceinline__ float tanh_of(float score, float softcap) {
  constexpr float kLn2 = 0.6931471805599453F;
  return tanhf(score * (kLn2 / softcap));
}

[[nodiscard]] __device__ __forceinline__ float capped(float tanh, float softcap) {
  constexpr float kLog2E = 1.4426950408889634F;
  return softcap * tanh * kLog2E;
}

template <class C>
__device__ __forceinline__ void cap_scores(ScoreFragment<C>& s, float softcap) {
#pragma unroll
  for (auto& tile : s.of) {
#pragma unroll
    for (auto& fragment : tile) {
#pragma unroll
      for (float& score : fragment) {
        score = capped(tanh_of(score, softcap), softcap);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void apply_tensor(float (&s)[C::kPartKeys / 8][4], const ForwardParameters& p,
                                             const Work& work, int half, int row, int key, int left) {
  constexpr float kLog2E = 1.4426950408889634F;
  const DeviceMask& mask = p.problem.mask;
  const std::int64_t start = work.batch * mask.batch + work.head * mask.head + row * mask.row + key * mask.key;
#pragma unroll
  for (int n = 0; n < C::kPartKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (n * 8 + i < left) {
        float& score = s[n][half * 2 + i];
        score = masked(score, mask, start + (n * 8 + i) * mask.key, kLog2E);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void apply_mask(ScoreFragment<C>& s, const ForwardParameters& p, const Work& work,
                                           int warp_row, int first, int lane) {
  const DeviceProblem& problem = p.problem;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = work.row + warp_row + tile * 16 + half * 8 + lane / 4;
      const int seen = problem.causal
                           ? static_cast<int>(min(problem.seq_k, query_of<C>(p, row) + problem.causal_offset + 1))
                           : static_cast<int>(problem.seq_k);
      const int left = seen - first - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < C::kPartKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = s.of[tile][n][half * 2 + i];
          score = n * 8 + i < left ? score : -INFINITY;
        }
      }
      if constexpr (C::kMasks) {
        if (problem.mask.kind != MaskKind::none && row < p.row_end) {
          apply_tensor<C>(s.of[tile], p, work, half, row, first + lane % 4 * 2, left);
        }
      }
      if (C::kMasks && has_left_end(problem)) {
        const int before = static_cast<int>(row + problem.first_offset) - first - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < C::kPartKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = s.of[tile][n][half * 2 + i];
            score = n * 8 + i < before ? -INFINITY : score;
          }
        }
      }
    }
  }
}

}  // namespace distr::cuda::sm80
