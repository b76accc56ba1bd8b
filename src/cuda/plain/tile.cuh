// SPDX-License-Identifier: Apache-2.0
// What the plain kernels share: element types, tiles of queries and their groups, staging q_hat and k_hat, one score.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/near.cuh"
#include "cuda/plain/tiles.h"
#include "cuda/ptx.cuh"

namespace distr::cuda::plain {

inline constexpr int kThreads = 256;      // 16 x 16: thread (y, x) owns 4 rows from 4 y on and 4 columns from 4 x on
inline constexpr int kDepth = 32;         // columns of q_hat and k_hat that are staged at a time
inline constexpr int kPitch = kSide + 4;  // floats between rows of a staged tile: 16-byte aligned, fewer bank conflicts
inline constexpr int kColumns = 128;      // columns of an output that one thread block takes
inline constexpr int kStagedRows = 32;    // rows of the wide factor that are staged at a time
inline constexpr float kHidden = -INFINITY;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls function(std::type_identity<T>{}) with the device's T of `dtype`, which is not f64.
template <class Function>
void with_element(DType dtype, Function&& function) {
  if (dtype == DType::f16) {
    function(std::type_identity<__half>{});
  } else if (dtype == DType::bf16) {
    function(std::type_identity<__nv_bfloat16>{});
  } else {
    function(std::type_identity<float>{});
  }
}

// Rows of a tensor with the strides of Q, K, V or O, from (b, h, row) on.
template <class T>
__device__ const T* rows_at(const void* data, const Strides& strides, std::int64_t b, std::int64_t h,
                            std::int64_t row) {
  return static_cast<const T*>(data) + b * strides.batch + h * strides.head + row * strides.row;
}

template <class T>
__device__ T* rows_at(void* data, const Strides& strides, std::int64_t b, std::int64_t h, std::int64_t row) {
  return static_cast<T*>(data) + b * strides.batch + h * strides.head + row * strides.row;
}

// Up to kSide rows of one block of Q, which share one order.
struct Tile {
  std::int64_t b, h, h_kv;
  std::int64_t first;  // row
  std::int64_t rows;   // none or fewer: nothing to do
  std::int64_t block, order_row;
  bool exact;
};

// `tiles`: of a block.
__device__ inline Tile find_tile(const DeviceProblem& problem, std::int64_t tiles, std::int64_t index) {
  const std::int64_t tile = index % tiles;
  const std::int64_t block_row = index / tiles;  // over all batches, heads and blocks
  const std::int64_t block = block_row % problem.blocks;
  const std::int64_t head = block_row / problem.blocks;
  Tile result;
  result.b = head / problem.heads_q;
  result.h = head % problem.heads_q;
  result.h_kv = result.h / (problem.heads_q / problem.heads_kv);
  result.first = block * problem.block + tile * kSide;
  const std::int64_t block_end = (block + 1) * problem.block;
  result.rows = min(min(block_end, problem.seq_q) - result.first, std::int64_t{kSide});
  result.block = block;
  result.order_row = block_row;
  result.exact = problem.exact || (problem.first_block_is_exact && block == 0);
  return result;
}

// The tile as the keys from `first_key` on meet it: exactly if they are near, which all rows of a tile agree on.
__device__ inline Tile at_keys(const DeviceProblem& problem, Tile tile, std::int64_t first_key) {
  if (problem.near.has && !tile.exact) {
    const auto key_tile = static_cast<int>(first_key / common::kNearTile);
    tile.exact = near_tiles(problem, tile.first, problem.seq_k).has(key_tile);
  }
  return tile;
}

// The tiles of keys that a tile of queries sees: the keys first .. end - 1.
struct SeenKeys {
  std::int64_t first, end;

  [[nodiscard]] __device__ bool has(std::int64_t first_key) const { return first <= first_key && first_key < end; }
};

__device__ inline SeenKeys seen_keys(const DeviceProblem& problem, const Tile& tile) {
  return {first_visible_key(problem, tile.first) / kSide * kSide, visible_keys(problem, tile.first + tile.rows - 1)};
}

// The groups of one tile: group g is the columns order[g * members] .. order[g * members + size(g) - 1].
struct TileGroups {
  const std::int32_t* order;  // [columns], in shared memory
  int columns;                // d
  int count;                  // r
  int members;

  [[nodiscard]] __device__ int size(int g) const { return min(members, columns - g * members); }
  [[nodiscard]] __device__ int column(int g, int member) const { return order[g * members + member]; }
};

// All threads call it; s_order [kMaxHeadDim] is ready once it returns.
__device__ inline TileGroups load_groups(const DeviceProblem& problem, const Tile& tile, const std::int32_t* g_order,
                                         std::int32_t* s_order) {
  __syncthreads();  // the last tile's order may still be read
  for (int c = static_cast<int>(threadIdx.x); c < problem.head_dim; c += kThreads) {
    s_order[c] = tile.exact ? c : g_order[tile.order_row * problem.head_dim + c];
  }
  __syncthreads();
  return {s_order, problem.head_dim, tile.exact ? problem.head_dim : problem.groups, tile.exact ? 1 : problem.members};
}

// The sum of the first `members` columns of group g in a row. Unrolled inside of loops over rows and columns, which are
// unrolled themselves, it would be a quarter of all code (docs/kernel-log.md, the plain kernels' loops over members).
template <class T>
__device__ __forceinline__ float sum_members(const TileGroups& groups, const T* row, int g, int members) {
  float sum = 0;
#pragma unroll 1
  for (int member = 0; member < members; ++member) {
    sum += to_float(row[groups.column(g, member)]);
  }
  return sum;
}

// s_q [kDepth][kPitch] = the groups from `first` on of q_hat, transposed: a group's sampled column or its mean. `q` is
// the tile's first row; rows and groups that there are not become 0.
template <class T>
__device__ void stage_q(const TileGroups& groups, bool mean, const T* q, std::int64_t stride, std::int64_t rows,
                        int first, float* s_q) {
  const int g = first + static_cast<int>(threadIdx.x) % kDepth;
  const int members = g >= groups.count ? 0 : mean ? groups.size(g) : 1;
#pragma unroll 2
  for (int row = static_cast<int>(threadIdx.x) / kDepth; row < kSide; row += kThreads / kDepth) {
    float sum = 0;
#pragma unroll 2  // two loads under way
    for (int member = 0; member < members && row < rows; ++member) {
      sum += to_float(q[row * stride + groups.column(g, member)]);
    }
    s_q[(g - first) * kPitch + row] = members > 1 ? sum / static_cast<float>(members) : sum;
  }
}

// s_k [kDepth][kPitch] = the groups from `first` on of k_hat, transposed: the sums of the groups' columns. `k` is the
// tile's first key.
template <class T>
__device__ void stage_k(const TileGroups& groups, const T* k, std::int64_t stride, std::int64_t keys, int first,
                        float* s_k) {
  const int g = first + static_cast<int>(threadIdx.x) % kDepth;
  const int members = g >= groups.count ? 0 : groups.size(g);
#pragma unroll 2
  for (int key = static_cast<int>(threadIdx.x) / kDepth; key < kSide; key += kThreads / kDepth) {
    float sum = 0;
#pragma unroll 2  // two loads under way
    for (int member = 0; member < members && key < keys; ++member) {
      sum += to_float(k[key * stride + groups.column(g, member)]);
    }
    s_k[(g - first) * kPitch + key] = sum;
  }
}

// r_c += A^T B of two staged tiles [depth][kPitch]: this thread's 4 rows of A's and 4 columns of B's.
__device__ inline void multiply(const float* s_a, const float* s_b, int depth, float (&r_c)[4][4]) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  const int x = static_cast<int>(threadIdx.x) % 16;
#pragma unroll 4
  for (int n = 0; n < depth; ++n) {
    const float4 a = *reinterpret_cast<const float4*>(s_a + n * kPitch + 4 * y);
    const float4 b = *reinterpret_cast<const float4*>(s_b + n * kPitch + 4 * x);
    const float r_a[4] = {a.x, a.y, a.z, a.w};
    const float r_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int row = 0; row < 4; ++row) {
#pragma unroll
      for (int column = 0; column < 4; ++column) {
        r_c[row][column] = fmaf(r_a[row], r_b[column], r_c[row][column]);
      }
    }
  }
}

__device__ inline double load_bias(const DeviceMask& mask, std::int64_t index) {
  switch (mask.dtype) {
    case DType::f16:
      return to_float(static_cast<const __half*>(mask.data)[index]);
    case DType::bf16:
      return to_float(static_cast<const __nv_bfloat16*>(mask.data)[index]);
    case DType::f32:
      return static_cast<const float*>(mask.data)[index];
    case DType::f64:
      break;
  }
  return static_cast<const double*>(mask.data)[index];
}

// The score of (i, j) after the mask (common/mask.h): a key hidden by -inf stays hidden whatever its score is, NaN and
// infinity included; a finite bias hides nothing, even the lowest there is.
__device__ inline float masked_score(const DeviceProblem& problem, const Tile& tile, std::int64_t i, std::int64_t j,
                                     float score) {
  constexpr float kLowest = -3.402823466e38F;
  const DeviceMask& mask = problem.mask;
  if (mask.kind == MaskKind::none) {
    return score;
  }
  const std::int64_t index = tile.b * mask.batch + tile.h * mask.head + i * mask.row + j * mask.key;
  if (mask.kind == MaskKind::boolean) {
    return static_cast<const std::uint8_t*>(mask.data)[index] != 0 ? score : kHidden;
  }
  const double bias = load_bias(mask, index);
  if (bias == -INFINITY) {
    return kHidden;
  }
  const float sum = score + static_cast<float>(bias < kLowest ? static_cast<double>(kLowest) : bias);
  const float floor = score < kLowest ? score : kLowest;
  return sum < floor ? floor : sum;
}

// The 16 threads of a row agree on the result.
__device__ inline float row_sum(float x) {
  for (int step = 8; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xFFFFFFFFU, x, step);
  }
  return x;
}

// What the means over the keys add to far scores of this thread's n-th row of 4: scale * sum of q_c mean_c over the
// columns that the groups drop. `q` is the tile's first row. The 16 threads of the row call it.
template <class T>
__device__ float dropped_score(const DeviceProblem& problem, float scale, const Tile& tile, const TileGroups& groups,
                               const float* key_means, const T* q, int n) {
  const float* means = key_means + key_means_at(problem, tile.b, tile.h_kv, tile.block);
  const int row = 4 * (static_cast<int>(threadIdx.x) / 16) + n;
  float sum = 0;
  const int end = row < tile.rows ? groups.columns : 0;
  for (int position = groups.count + static_cast<int>(threadIdx.x) % 16; position < end; position += 16) {
    const int c = groups.order[position];
    sum = fmaf(to_float(q[row * problem.q.row + c]), means[c], sum);
  }
  return row_sum(sum) * scale;
}

// What is staged at a time for the scores of one tile of queries and one of keys.
struct Staged {
  float a[kDepth * kPitch];  // q_hat^T, or dO^T
  float b[kDepth * kPitch];  // k_hat^T, or V^T
};

// r_s = q_hat k_hat^T of this thread's 4 rows and 4 keys. `q` is the tile's first row, `k` the first key.
template <class T>
__device__ void compute_products(const DeviceProblem& problem, const Tile& tile, const TileGroups& groups, const T* q,
                                 const T* k, std::int64_t first_key, Staged& staged, float (&r_s)[4][4]) {
  float product[4][4] = {};
  for (int first = 0; first < groups.count; first += kDepth) {
    __syncthreads();
    stage_q(groups, problem.mean, q, problem.q.row, tile.rows, first, staged.a);
    stage_k(groups, k, problem.k.row, problem.seq_k - first_key, first, staged.b);
    __syncthreads();
    multiply(staged.a, staged.b, min(kDepth, groups.count - first), product);
  }
  for (int element = 0; element < 16; ++element) {
    r_s[element / 4][element % 4] = product[element / 4][element % 4];
  }
}

// Whether probabilities are to be times the slope of the cap on their scores. Then its logarithm is a part of the
// scores: there are no registers to keep it.
enum class Slope : std::uint8_t { none, included };

// r_s = softcap * tanh(r_s / softcap).
__device__ inline void cap_scores(float softcap, Slope slope, float (&r_s)[4][4]) {
  const float inverse = 1.0F / softcap;
  for (int row = 0; row < 4; ++row) {
    for (float& score : r_s[row]) {
      const float t = tanhf(score * inverse);
      score = softcap * t + (slope == Slope::included ? logf(fmaf(-t, t, 1.0F)) : 0.0F);
    }
  }
}

// r_s becomes scores in natural units from q_hat k_hat^T; hidden ones are -inf. `dropped`(row): what the means of the
// keys add.
template <class Dropped>
__device__ void finish_scores(const DeviceProblem& problem, float scale, const Tile& tile, std::int64_t first_key,
                              const Dropped& dropped, Slope slope, float (&r_s)[4][4]) {
  for (int row = 0; row < 4; ++row) {
    const float constant = dropped(row);
    for (float& score : r_s[row]) {
      score = score * scale + constant;
    }
  }
  if (problem.softcap != 0) {
    cap_scores(problem.softcap, slope, r_s);
  }
  const int y = static_cast<int>(ptx::opaque(threadIdx.x)) / 16;  // else what rows see is kept from tile to tile
  const int x = static_cast<int>(threadIdx.x) % 16;
  for (int row = 0; row < 4; ++row) {
    const std::int64_t i = tile.first + 4 * y + row;
    // Of the tile's keys; 32 bits spare registers.
    const auto in_tile = [&](std::int64_t key) {
      return static_cast<int>(max(min(key - first_key, std::int64_t{kSide}), std::int64_t{0}));
    };
    const int first = in_tile(first_visible_key(problem, i));
    const int end = 4 * y + row < tile.rows ? in_tile(visible_keys(problem, i)) : 0;
    for (int key = 0; key < 4; ++key) {
      const int j = 4 * x + key;
      const bool is_seen = first <= j && j < end;
      r_s[row][key] = is_seen ? masked_score(problem, tile, i, first_key + j, r_s[row][key]) : kHidden;
    }
  }
}

// s_b [kStagedRows][kColumns] = value(row, column) where row < rows and column < columns, else 0. Returns, to all
// threads, whether every value is finite and `finite` was true in all of them.
template <class Value>
__device__ bool stage_wide(std::int64_t rows, int columns, bool finite, float* s_b, const Value& value) {
#pragma unroll 4
  for (int n = static_cast<int>(threadIdx.x); n < kStagedRows * kColumns; n += kThreads) {
    const int row = n / kColumns;
    const int column = n % kColumns;
    const float x = row < rows && column < columns ? value(row, column) : 0.0F;
    finite = finite && isfinite(x);
    s_b[n] = x;
  }
  return __syncthreads_and(finite ? 1 : 0) != 0;
}

// r_c += A^T B with A = s_a [kStagedRows][kPitch] and B = s_b [kStagedRows][kColumns]: this thread's 4 columns of A and
// its 8 of B, 4 x .. 4 x + 3 and 64 + 4 x .. 64 + 4 x + 3. An element of A that is 0 (a key without probability)
// contributes nothing whatever B is, and a column n of r_c with bit n of `unused` set receives nothing whatever A is:
// 0 * NaN must not be added. Where all is `finite`, 0 does that by itself. The product is summed apart from r_c: a
// chain of all rows that a sum is over would be rounded as often, and err more than a plain implementation's.
__device__ inline void accumulate(const float* s_a, const float* s_b, int columns, bool finite, unsigned unused,
                                  float (&r_c)[4][8]) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  const int x = static_cast<int>(threadIdx.x) % 16;
  float r_product[4][8] = {};
#pragma unroll 4
  for (int n = 0; n < kStagedRows; ++n) {
    const float4 a = *reinterpret_cast<const float4*>(s_a + n * kPitch + 4 * y);
    const float r_a[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (64 * half >= columns) {
        break;
      }
      const float4 b = *reinterpret_cast<const float4*>(s_b + n * kColumns + 64 * half + 4 * x);
      const float r_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int row = 0; row < 4; ++row) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& sum = r_product[row][4 * half + c];
          sum = finite || (r_a[row] != 0 && (unused >> (4 * half + c) & 1U) == 0) ? fmaf(r_a[row], r_b[c], sum) : sum;
        }
      }
    }
  }
#pragma unroll
  for (int row = 0; row < 4; ++row) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      r_c[row][n] += r_product[row][n];
    }
  }
}

// The column of element n of a row of r_c.
__device__ inline int column_of(int n) { return n / 4 * 64 + 4 * (static_cast<int>(threadIdx.x) % 16) + n % 4; }

}  // namespace distr::cuda::plain
