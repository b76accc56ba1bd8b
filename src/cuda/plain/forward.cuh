// SPDX-License-Identifier: Apache-2.0
// What the kernels of the plain forward share: their arguments, shared memory, online softmax, P V and the results.
#pragma once

#include "cuda/plain/tile.cuh"
#include "cuda/ptx.cuh"
#include "cuda/sequence.cuh"

namespace distr::cuda::plain {

struct ForwardArguments {
  DeviceProblem problem;
  std::int64_t tiles;  // of a block
  float scale;
  const void* q;              // [batch, heads_q, seq_q, d]
  const void* k;              // [batch, heads_kv, seq_k, d]
  const void* v;              // [batch, heads_kv, seq_k, dv]
  const std::int32_t* order;  // [batch, heads_q, blocks, d]
  const float* key_means;     // [batch, heads_kv, means, d], where far scores keep them
  void* o;                    // [batch, heads_q, seq_q, dv]
  float* lse;                 // [batch, heads_q, seq_q], or null
  std::int32_t* halves;       // [batch, heads_q, ceil(seq_q / 64), 2], or null
  DeviceLengths lengths;      // where they are data
  std::int64_t lse_stride;    // of a head
};

// Those of batch entry b.
template <class T>
__device__ void enter(ForwardArguments& arguments, std::int64_t b) {
  DeviceProblem& problem = arguments.problem;
  const DeviceLengths& lengths = arguments.lengths;
  const DeviceSequence sequence(problem, lengths, b);
  advance<T>(arguments.q, entry_offset(lengths, problem.q, b, sequence.first_row));
  advance<T>(arguments.k, entry_offset(lengths, problem.k, b, sequence.first_key));
  advance<T>(arguments.v, entry_offset(lengths, problem.v, b, sequence.first_key));
  advance<T>(arguments.o, entry_offset(lengths, problem.o, b, sequence.first_row));
  if (arguments.lse != nullptr) {
    arguments.lse += lse_offset(lengths, problem, b, sequence.first_row);
  }
  enter(problem, lengths, sequence);
}

struct alignas(16) ForwardShared {
  union {
    Staged staged;
    float v[kStagedRows * kColumns];
  };
  float p[kSide * kPitch];  // P^T [key][row]
  std::int32_t order[kMaxHeadDim];
};
static_assert(sizeof(ForwardShared) <= 48 * 1024);

// What the tiles so far say of this thread's rows.
struct RowState {
  float maximum[4] = {kHidden, kHidden, kHidden, kHidden};
  float sum[4] = {};
  float o[4][8] = {};  // with kHeadroom; columns column_of(0) .. column_of(7)
};

// P in the product with V, and O with it, is so much smaller than in the row sums: sums of values whose mean is finite
// may leave fp32's range. It does for 2^24 keys.
inline constexpr float kHeadroom = 0x1p24F;

// The 16 threads of a row agree on the result.
__device__ inline float row_maximum(float x) {
  for (int step = 8; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, step));
  }
  return x;
}

// r_s becomes P relative to the rows' new maximum, which goes to shared.p with its headroom.
__device__ inline void online_softmax(float (&r_s)[4][4], RowState& rows, ForwardShared& shared) {
  const int y = static_cast<int>(ptx::opaque(threadIdx.x)) / 16;
  const int x = static_cast<int>(ptx::opaque(threadIdx.x)) % 16;
  for (int row = 0; row < 4; ++row) {
    const float tile_maximum = fmaxf(fmaxf(r_s[row][0], r_s[row][1]), fmaxf(r_s[row][2], r_s[row][3]));
    const float maximum = fmaxf(rows.maximum[row], row_maximum(tile_maximum));
    // Where every key is hidden so far, e^(-inf - 0) = 0 is wanted, not e^(-inf + inf).
    const float shift = maximum == kHidden ? 0.0F : maximum;
    const float shrink = expf(rows.maximum[row] - shift);
    float sum = 0;
    for (int key = 0; key < 4; ++key) {
      r_s[row][key] = expf(r_s[row][key] - shift);
      sum += r_s[row][key];
    }
    rows.maximum[row] = maximum;
    rows.sum[row] = rows.sum[row] * shrink + row_sum(sum);
    for (float& value : rows.o[row]) {
      value = shrink == 0 ? 0 : value * shrink;  // forgets an infinity, too
    }
  }
  constexpr float kShrink = 1 / kHeadroom;
  for (int key = 0; key < 4; ++key) {
    *reinterpret_cast<float4*>(shared.p + (4 * x + key) * kPitch + 4 * y) =
        make_float4(r_s[0][key] * kShrink, r_s[1][key] * kShrink, r_s[2][key] * kShrink, r_s[3][key] * kShrink);
  }
}

// O += P V of 64 keys, as far as there are so many; P from shared.p. `v`: the first key, from the block's first column
// on.
template <class T>
__device__ void add_values(const T* v, std::int64_t stride, std::int64_t keys, int columns, ForwardShared& shared,
                           RowState& rows) {
  for (int staged = 0; staged < kSide; staged += kStagedRows) {
    __syncthreads();
    const bool finite = stage_wide(keys - staged, columns, true, shared.v,
                                   [&](int key, int column) { return to_float(v[(staged + key) * stride + column]); });
    accumulate(shared.p + staged * kPitch, shared.v, columns, finite, 0, rows.o);
  }
}

// Writes this thread's part of O: value(row, n) is element n of one of its rows.
template <class T, class Value>
__device__ void store_o(const ForwardArguments& arguments, const Tile& tile, int first_column, int columns,
                        const Value& value) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  for (int row = 0; row < 4; ++row) {
    if (4 * y + row >= tile.rows) {
      break;
    }
    T* o = rows_at<T>(arguments.o, arguments.problem.o, tile.b, tile.h, tile.first + 4 * y + row) + first_column;
    for (int n = 0; n < 8; ++n) {
      const int column = column_of(n);
      if (column < columns) {
        o[column] = from_float<T>(value(row, n));
      }
    }
  }
}

// Writes LSE of one row of a tile.
__device__ inline void store_lse(const ForwardArguments& arguments, const Tile& tile, int row, float maximum,
                                 float sum) {
  const DeviceProblem& problem = arguments.problem;
  arguments.lse[(tile.b * problem.heads_q + tile.h) * arguments.lse_stride + tile.first + row] =
      sum == 0 ? kHidden : maximum + logf(sum);
}

}  // namespace distr::cuda::plain
