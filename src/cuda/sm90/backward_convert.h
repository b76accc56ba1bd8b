// SPDX-License-Identifier: Apache-2.0
// dQ, dK and dV from sums in fp32, in memory: the heads that share one, the groups' columns, the scale, the rounding.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/problem.h"
#include "cuda/sequence.cuh"

namespace distr::cuda::sm90 {

// Sums lie in fragments, as the tensor cores leave them: [rows / 16][columns / 8][kFragment], of which a lane has four
// in a row: (row, column) = (lane / 4, 2 (lane % 4)), its right neighbour, and the same 8 rows below.
inline constexpr int kFragment = 128;

// The rows of dQ's sums in memory of a head, and those of dK's and dV's: whole tiles.
inline constexpr int kQueryTileRows = 64;
inline constexpr int kKeyTileRows = 128;

// What says which rows see a key: a problem, or one packed sequence's part of it.
struct VisibleRows : VisibleKeys {
  std::int64_t seq_q;
};

[[nodiscard]] __device__ inline VisibleRows visible_rows(const DeviceProblem& problem, const DeviceLengths& lengths,
                                                         const DeviceSequence& sequence) {
  const std::int64_t shift = corner_shift(problem, lengths, sequence);
  return {{problem.causal, sequence.keys, problem.causal_offset + shift,
           has_left_end(problem) ? problem.first_offset + shift : problem.first_offset},
          sequence.rows};
}

// The first tile of kQueryTileRows queries with one that sees a key from `key` on.
template <class Rows>
[[nodiscard]] __host__ __device__ int first_query_tile(const Rows& of, int key) {
  const std::int64_t row = of.causal ? key - of.causal_offset : 0;
  return static_cast<int>(row < 0 ? 0 : row > of.seq_q ? of.seq_q : row) / kQueryTileRows;
}

// The keys, from key 0 on, of the blocks whose first_query_tile() is the tile of `row` or one before.
__host__ __device__ inline std::int64_t keys_of_tile(const DeviceProblem& problem, int row) {
  const int end = row + kQueryTileRows;
  const std::int64_t keys = end + problem.causal_offset;
  return !problem.causal || end > problem.seq_q || keys > problem.seq_k ? problem.seq_k : keys < 0 ? 0 : keys;
}

// Behind the last tile with one that sees a key before `end`, of a sliding window.
template <class Rows>
[[nodiscard]] __host__ __device__ int end_query_tile(const Rows& of, std::int64_t end) {
  const std::int64_t keys = end < of.seq_k ? end : of.seq_k;
  const std::int64_t rows = has_left_end(of) ? keys - of.first_offset : of.seq_q;
  const std::int64_t clamped = rows < 0 ? 0 : rows > of.seq_q ? of.seq_q : rows;
  return static_cast<int>((clamped + kQueryTileRows - 1) / kQueryTileRows);
}

// What a column of the result takes of the sum of its group.
enum class Share : std::uint8_t {
  all,    // dK of every column: k_hat is their sum. Also where every column is its own group
  mean,   // dQ, where q_hat is the mean
  first,  // dQ, where q_hat is the group's first column
};

inline constexpr int kConvertedRows = 64;  // of a thread block, which have one order

// The sums of a set of keys.
struct Sums {
  const float* data;          // [B, heads, padded rows / 16, columns / 8][kFragment]; null: there are none
  int columns;                // padded to a multiple of 16, up to 128
  bool has_ds_sums;           // behind each kConvertedRows rows, or room for them: a row's sum of dS
  const std::int32_t* order;  // [B, heads, blocks, d], or null: every column is its own group
  bool spread;                // they are of single columns, dQ~, and a group's are added; else they are of groups
  Share share;
};

// A row's sum of dS over all of its keys, and whether some are far.
struct FarRow {
  float ds_sum;
  bool has_far;
};

// What dQ of dropped columns gets of far keys: the means of the keys times the row's sum of dS (method, 8).
struct FarSums {
  const FarRow* of_row;  // [B, heads, rows], or null: nothing
  const float* means;    // [B, heads / heads_per_kv, count, columns]
  std::int64_t count;    // one, or one for each block
  std::int64_t heads_per_kv;
};

// Packed sequences, whose rows of the result are Q's or K's, and whose sums begin where padded_start() says. A
// conversion of them has the rows of all as one head of a batch of one.
struct PackedResult {
  DeviceProblem problem;
  DeviceLengths lengths;  // not packed: there are none
  bool of_keys;
};

struct Conversion {
  DType dtype;
  Sums sums[2];  // added in this order
  FarSums far;
  std::int64_t padded_rows;         // a multiple of 16
  std::int64_t first_row, end_row;  // there are no sums of those outside: zeros
  std::int64_t blocks;              // of rows of the result, with orders of their own
  std::int64_t block;               // rows of one: a multiple of kConvertedRows, or at least `rows`
  bool first_block_is_exact;        // its columns are their own groups
  int groups, members;
  float scale;
  std::int64_t batch, heads;      // of the sums
  std::int64_t heads_per_result;  // so many make one head of the result, added in order
  std::int64_t rows;
  int columns;  // of the result
  void* to;
  Strides strides;  // any
  PackedResult packed;
};
void convert_sums(const Conversion& conversion, void* stream);

}  // namespace distr::cuda::sm90
