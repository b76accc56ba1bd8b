// SPDX-License-Identifier: Apache-2.0
// What the kernels of the plain backward share: their arguments, and dS of one tile of queries and one of keys.
#pragma once

#include "cuda/plain/tile.cuh"
#include "cuda/sequence.cuh"

namespace distr::cuda::plain {

struct alignas(16) BackwardShared {
  union {
    Staged staged;
    float wide[kStagedRows * kColumns];
  };
  float weights[kSide * kPitch];  // dS^T [key][row] for dQ; P or dS [row][key] for dV and dK
  std::int32_t order[kMaxHeadDim];
  std::int32_t group[kMaxHeadDim];  // of each column; from groups.count on: dropped
};
static_assert(sizeof(BackwardShared) <= 48 * 1024);

struct BackwardArguments {
  DeviceProblem problem;
  std::int64_t tiles;          // of a block
  std::int64_t tiles_of_head;  // of a query head
  float scale;
  const void* q;              // [batch, heads_q, seq_q, d]
  const void* k;              // [batch, heads_kv, seq_k, d]
  const void* v;              // [batch, heads_kv, seq_k, dv]
  const std::int32_t* order;  // [batch, heads_q, blocks, d]
  const float* key_means;     // [batch, heads_kv, means, d], where far scores keep them
  const void* o;              // [batch, heads_q, seq_q, dv]
  const float* lse;           // [batch, heads_q, seq_q]
  const void* d_o;            // as o
  const float* d_lse;         // as lse, or null
  float* delta;               // [batch, heads_q, seq_q]: D = rowsum(dO * O) - dLSE
  void* d_q;                  // [batch, heads_q, seq_q, d]
  void* d_k;                  // [batch, heads_kv, seq_k, d]
  void* d_v;                  // [batch, heads_kv, seq_k, dv]
  Strides d_q_strides, d_k_strides, d_v_strides;
  float* d_mask;               // [mask_shape], contiguous
  std::int64_t mask_shape[4];  // 1 along the axes that repeat
  DeviceLengths lengths;       // where they are data
  std::int64_t lse_stride;     // of a head of LSE, dLSE and D
  std::int64_t key_tiles;      // of a KV head
};

// Those of batch entry b.
template <class T>
__device__ void enter(BackwardArguments& arguments, std::int64_t b) {
  DeviceProblem& problem = arguments.problem;
  const DeviceLengths& lengths = arguments.lengths;
  const DeviceSequence sequence(problem, lengths, b);
  const std::int64_t rows = lse_offset(lengths, problem, b, sequence.first_row);
  advance<T>(arguments.q, entry_offset(lengths, problem.q, b, sequence.first_row));
  advance<T>(arguments.k, entry_offset(lengths, problem.k, b, sequence.first_key));
  advance<T>(arguments.v, entry_offset(lengths, problem.v, b, sequence.first_key));
  advance<T>(arguments.d_o, entry_offset(lengths, problem.o, b, sequence.first_row));
  advance<T>(arguments.d_q, entry_offset(lengths, arguments.d_q_strides, b, sequence.first_row));
  advance<T>(arguments.d_k, entry_offset(lengths, arguments.d_k_strides, b, sequence.first_key));
  advance<T>(arguments.d_v, entry_offset(lengths, arguments.d_v_strides, b, sequence.first_key));
  arguments.lse += rows;
  arguments.delta += rows;
  enter(problem, lengths, sequence);
}

// s [kDepth][kPitch] = columns first .. first + kDepth - 1 of up to kSide rows, transposed; 0 where there are none.
template <class T>
__device__ void stage_columns(const T* data, std::int64_t stride, std::int64_t rows, int columns, int first, float* s) {
  const int c = first + static_cast<int>(threadIdx.x) % kDepth;
#pragma unroll 2
  for (int row = static_cast<int>(threadIdx.x) / kDepth; row < kSide; row += kThreads / kDepth) {
    s[(c - first) * kPitch + row] = row < rows && c < columns ? to_float(data[row * stride + c]) : 0.0F;
  }
}

// weights [column][row] = the transpose of this thread's piece.
__device__ inline void store_transposed(const float (&r_s)[4][4], float* s_weights) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  const int x = static_cast<int>(threadIdx.x) % 16;
  for (int key = 0; key < 4; ++key) {
    *reinterpret_cast<float4*>(s_weights + (4 * x + key) * kPitch + 4 * y) =
        make_float4(r_s[0][key], r_s[1][key], r_s[2][key], r_s[3][key]);
  }
}

// Whether far scores may have the means of dropped columns, as near keys bring them.
enum class Means : std::uint8_t { none, possible };

// r_p = P = e^(S - LSE) of this thread's 4 rows and 4 keys, with its slope times that; 0 where LSE = -inf.
template <class T, Means kMeans = Means::possible>
__device__ void compute_probabilities(const BackwardArguments& arguments, const Tile& tile, const TileGroups& groups,
                                      std::int64_t first_key, Slope slope, Staged& staged, float (&r_p)[4][4]) {
  const DeviceProblem& problem = arguments.problem;
  const T* q = rows_at<T>(arguments.q, problem.q, tile.b, tile.h, tile.first);
  compute_products(problem, tile, groups, q, rows_at<T>(arguments.k, problem.k, tile.b, tile.h_kv, first_key),
                   first_key, staged, r_p);
  const bool has_means = kMeans == Means::possible && problem.near.has_means && !tile.exact;
  const auto dropped = [&](int row) {
    return has_means ? dropped_score(problem, arguments.scale, tile, groups, arguments.key_means, q, row) : 0.0F;
  };
  finish_scores(problem, arguments.scale, tile, first_key, dropped, slope, r_p);
  const int y = static_cast<int>(threadIdx.x) / 16;
  const float* lse = arguments.lse + (tile.b * problem.heads_q + tile.h) * arguments.lse_stride + tile.first;
  for (int row = 0; row < 4; ++row) {
    const float of_row = 4 * y + row < tile.rows ? lse[4 * y + row] : kHidden;
    for (float& p : r_p[row]) {
      p = p == kHidden || of_row == kHidden ? 0.0F : expf(p - of_row);
    }
  }
}

// r_s = dS = P * (dO V^T - D), likewise; 0 where P is 0, whatever V and dO are.
template <class T, Means kMeans = Means::possible>
__device__ void compute_score_gradients(const BackwardArguments& arguments, const Tile& tile, const TileGroups& groups,
                                        std::int64_t first_key, Slope slope, Staged& staged, float (&r_s)[4][4]) {
  const DeviceProblem& problem = arguments.problem;
  compute_probabilities<T, kMeans>(arguments, tile, groups, first_key, slope, staged, r_s);
  const T* d_o = rows_at<T>(arguments.d_o, problem.o, tile.b, tile.h, tile.first);
  const T* v = rows_at<T>(arguments.v, problem.v, tile.b, tile.h_kv, first_key);
  float d_p[4][4] = {};
  for (int first = 0; first < problem.head_dim_v; first += kDepth) {
    __syncthreads();
    stage_columns(d_o, problem.o.row, tile.rows, problem.head_dim_v, first, staged.a);
    stage_columns(v, problem.v.row, problem.seq_k - first_key, problem.head_dim_v, first, staged.b);
    __syncthreads();
    multiply(staged.a, staged.b, min(kDepth, problem.head_dim_v - first), d_p);
  }
  const int y = static_cast<int>(threadIdx.x) / 16;
  const float* delta = arguments.delta + (tile.b * problem.heads_q + tile.h) * arguments.lse_stride + tile.first;
  for (int row = 0; row < 4; ++row) {
    const float of_row = 4 * y + row < tile.rows ? delta[4 * y + row] : 0.0F;
    for (int key = 0; key < 4; ++key) {
      r_s[row][key] = r_s[row][key] == 0 ? 0.0F : r_s[row][key] * (d_p[row][key] - of_row);
    }
  }
}

}  // namespace distr::cuda::plain
