// SPDX-License-Identifier: Apache-2.0
// What the grouping kernels share: which rows of Q decide a row of the order, and how warps load rows.
//
// A thread block reads `tiles` tiles of 64 columns. Each tile has `groups` warps, which take turns at chunks of 16
// rows. Lane 4 g + t holds 8 columns of the rows 4 t .. 4 t + 3 of a chunk and loads `kVector` neighbouring columns at
// a time, so the lanes with the same t read 128 contiguous bytes of a row. This is also the layout of B = Q in
// mma.m16n8k16 with rows as k, so the hash needs no shared memory between its loads and the tensor cores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "common/block.h"
#include "cuda/divisor.cuh"
#include "cuda/launch.h"
#include "kernel.h"

namespace distr::cuda::grouping {

inline constexpr int kChunkRows = 16;
inline constexpr int kTileColumns = 64;
inline constexpr int kMaxThreads = 256;
inline constexpr int kMaxGroups = 4;    // warps of a tile
inline constexpr int kPieceRows = 256;  // blocks of more rows are cut into pieces
inline constexpr int kMaxPieces = 64;

// How the warps of a thread block share the columns.
struct Warps {
  int tiles;   // ceil(d / 64), 1 to 8
  int groups;  // warps of a tile: 1, 2 or 4

  explicit Warps(std::int64_t head_dim)
      : tiles(static_cast<int>(common::ceil_div(head_dim, kTileColumns))),
        groups(tiles <= 2   ? kMaxGroups
               : tiles <= 4 ? 2
                            : 1) {}
  [[nodiscard]] int count() const { return tiles * groups; }
};

// Consecutive rows of one head.
struct RowSpan {
  const std::byte* first = nullptr;
  std::int64_t stride = 0;  // bytes
  int count = 0;
};

// Strides in bytes from strides in elements.
[[nodiscard]] inline Strides in_bytes(const Strides& strides, DType dtype) {
  const auto bytes = static_cast<std::int64_t>(size_of(dtype));
  return {strides.batch * bytes, strides.head * bytes, strides.row * bytes};
}

// The rows of Q that decide each row of the order [batch, heads, blocks], cut into `pieces`. A head has at most 2^29
// rows (unsupported_reason()), so 32 bits count them.
struct QueryPieces {
  const std::byte* q;     // [batch, heads, seq, d]
  Strides strides;        // bytes
  Divisor heads, blocks;  // fewer than 2^31 rows of the order and pieces in all
  Divisor pieces;         // of a block
  int piece_rows;         // a multiple of kPieceRows where there are several
  int block;              // l, at most seq
  int seq;
  int previous;        // 1: a block's order comes from the block before it, and the first block has none
  std::int64_t count;  // of all pieces

  // All but where Q is.
  QueryPieces(const Problem& problem, const Grouping& grouping)
      : q(nullptr),
        strides(in_bytes(problem.q, problem.dtype)),
        heads(static_cast<std::uint32_t>(problem.heads_q)),
        blocks(static_cast<std::uint32_t>(common::num_blocks(problem, grouping))),
        pieces(1),
        block(static_cast<int>(std::min(grouping.block, std::max<std::int64_t>(1, problem.seq_q)))),
        seq(static_cast<int>(problem.seq_q)),
        previous(grouping.order_from == OrderFrom::previous ? 1 : 0) {
    const std::int64_t most = std::min<std::int64_t>(kMaxPieces, common::ceil_div(block, kPieceRows));
    piece_rows =
        most == 1 ? block : static_cast<int>(common::ceil_div(common::ceil_div(block, most), kPieceRows)) * kPieceRows;
    pieces = Divisor(static_cast<std::uint32_t>(common::ceil_div(block, piece_rows)));
    count = problem.batch * problem.heads_q * common::num_blocks(problem, grouping) * pieces.value();
  }

  [[nodiscard]] std::int64_t order_rows() const { return count / pieces.value(); }

  // The rows of piece `index` = (row of the order) * pieces + piece. Its first row within the block is
  // (index % pieces) * piece_rows.
  [[nodiscard]] __device__ RowSpan at(std::uint32_t index) const {
    const std::uint32_t row = index / pieces;
    const std::uint32_t head = row / blocks;
    const int source = static_cast<int>(row % blocks) - previous;
    const int first = source * block + static_cast<int>(index % pieces) * piece_rows;
    const int end = min(min(first + piece_rows, (source + 1) * block), seq);
    const std::byte* start = q + head / heads * strides.batch + head % heads * strides.head + first * strides.row;
    return {start, strides.row, source < 0 ? 0 : max(end - first, 0)};
  }
};

// The part of a thread in its thread block.
struct Lane {
  int tile, group, groups;
  int g, t;     // the lane is 4 g + t
  int columns;  // d

  __device__ Lane(int warps_of_tile, int head_dim)
      : tile(static_cast<int>(threadIdx.x / 32) >> (warps_of_tile >> 1)),  // log2 of 1, 2 or 4
        group(static_cast<int>(threadIdx.x / 32) & (warps_of_tile - 1)),
        groups(warps_of_tile),
        g(static_cast<int>(threadIdx.x % 32 / 4)),
        t(static_cast<int>(threadIdx.x % 4)),
        columns(head_dim) {}
};

// The i-th of the 8 columns of its tile that lane 4 g + t holds, where a load has `vector` columns.
[[nodiscard]] __host__ __device__ constexpr int column_of(int vector, int g, int i) {
  return i / vector * 8 * vector + g * vector + i % vector;
}

// What a lane loads at once: its rows of kChunks chunks, which are `groups` chunks apart.
template <class T, int kVector>
struct Round {
  static constexpr int kBytes = sizeof(T);
  static constexpr int kChunks = kVector * kBytes == 16 ? 4 / kBytes : 1;
  static constexpr int kWords = 2 * kBytes;  // of 8 columns

  using Row = std::array<std::uint32_t, kWords>;  // 8 columns of a row, as they lie in memory

  Row words[kChunks][4];  // [chunk][row]

  // How many rows the warps of a tile read in a round.
  [[nodiscard]] __device__ static int rows(const Lane& lane) { return kChunks * lane.groups * kChunkRows; }
  // This lane's first row of `chunk`, counted from the round's first row.
  [[nodiscard]] __device__ static int row(const Lane& lane, int chunk) {
    return (chunk * lane.groups + lane.group) * kChunkRows + 4 * lane.t;
  }

  // Loads the round that starts at row n, with zeros behind the last row and the last column.
  __device__ void load(const RowSpan& rows, int n, const Lane& lane) {
    for_each_row(rows, n, lane,
                 [&](Row& row, const std::byte* from, bool exists) { row = load_row(from, exists, lane); });
  }
  // The same, with the row `instead` in place of the rows behind the last.
  __device__ void load(const RowSpan& rows, int n, const Lane& lane, const std::byte* instead) {
    for_each_row(rows, n, lane, [&](Row& row, const std::byte* from, bool exists) {
      row = load_row(exists ? from : instead, true, lane);
    });
  }

  // A lane's columns of a row; zeros where there are none.
  [[nodiscard]] __device__ static Row load_row(const std::byte* row, bool exists, const Lane& lane) {
    Row result;
#pragma unroll
    for (int i = 0; i < 8; i += kVector) {
      const int column = lane.tile * kTileColumns + column_of(kVector, lane.g, i);
      load_vector(result, i, row + column * kBytes, exists && column < lane.columns);
    }
    return result;
  }

  // Column i of a row, as fp32.
  [[nodiscard]] __device__ static float value(const Row& row, int i) {
    const std::uint32_t word = row[i * kBytes / 4];
    if constexpr (kBytes == 4) {
      return __uint_as_float(word);
    } else {
      const auto element = static_cast<unsigned short>(i % 2 == 0 ? word : word >> 16);
      if constexpr (std::is_same_v<T, __half>) {
        return __half2float(__ushort_as_half(element));
      } else {
        return __bfloat162float(__ushort_as_bfloat16(element));
      }
    }
  }

 private:
  // Calls visit(the lane's words of a row, where the row starts, whether it exists) for each row.
  template <class Visitor>
  __device__ void for_each_row(const RowSpan& rows, int n, const Lane& lane, Visitor visit) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int first = n + row(lane, chunk);
      const std::byte* row = rows.first + first * rows.stride;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        visit(words[chunk][r], row, first + r < rows.count);
        row += rows.stride;
      }
    }
  }

  // Loads the columns i .. i + kVector - 1 of a row.
  __device__ static void load_vector(Row& row, int i, const std::byte* from, bool valid) {
    const int word = i * kBytes / 4;
    if constexpr (kVector * kBytes == 16) {
      const uint4 vector = valid ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
      row[word] = vector.x;
      row[word + 1] = vector.y;
      row[word + 2] = vector.z;
      row[word + 3] = vector.w;
    } else if constexpr (kBytes == 4) {
      row[word] = valid ? *reinterpret_cast<const std::uint32_t*>(from) : 0U;
    } else {
      const std::uint32_t element = valid ? *reinterpret_cast<const unsigned short*>(from) : 0U;
      row[word] = i % 2 == 0 ? element : row[word] | element << 16;
    }
  }
};

// Calls function.template operator()<T, kVector>() with the element's type. A load has as many columns as 16 bytes
// hold, or one where rows do not start at multiples of 16 bytes.
template <class Function>
void with_loads(DType dtype, bool aligned, Function&& function) {
  if (dtype == DType::f16) {
    aligned ? function.template operator()<__half, 8>() : function.template operator()<__half, 1>();
  } else if (dtype == DType::bf16) {
    aligned ? function.template operator()<__nv_bfloat16, 8>() : function.template operator()<__nv_bfloat16, 1>();
  } else {
    aligned ? function.template operator()<float, 4>() : function.template operator()<float, 1>();
  }
}

// Whether every row of a tensor [batch, heads, rows, d] starts at a multiple of 16 bytes, if the tensor does, and is
// one long.
[[nodiscard]] inline bool has_aligned_rows(const Strides& bytes, std::int64_t batch, std::int64_t heads,
                                           std::int64_t row_bytes) {
  const auto fits = [](std::int64_t length, std::int64_t stride) { return length == 1 || stride % 16 == 0; };
  return fits(batch, bytes.batch) && fits(heads, bytes.head) && bytes.row % 16 == 0 && row_bytes % 16 == 0;
}
[[nodiscard]] inline bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// Why the kernels cannot serve, or "".
[[nodiscard]] inline std::string unsupported_reason(const Problem& problem, const Grouping& grouping,
                                                    Strategy strategy) {
  if (is_exact(grouping)) {
    return "the problem is exact: the order is the identity";
  }
  if (grouping.strategy != strategy) {
    return std::string("serves the strategy ") + traits(strategy).name + " only";
  }
  if (problem.dtype == DType::f64) {
    return "computes in fp32; f64 is for the reference";
  }
  constexpr std::int64_t kMaxRows = std::int64_t{1} << 29;  // kernels count a head's rows in 32 bits
  if (std::max(problem.seq_q, problem.seq_k) > kMaxRows) {
    return "seq_q is " + std::to_string(problem.seq_q) + " and seq_k " + std::to_string(problem.seq_k) +
           "; allowed: up to " + std::to_string(kMaxRows);
  }
  // Pieces of Q and of K share one grid. Counted as double: int64 could overflow.
  constexpr double kMax = 2147483647;
  const std::int64_t block = std::min(grouping.block, std::max<std::int64_t>(1, problem.seq_q));
  const auto pieces = static_cast<double>(std::min<std::int64_t>(kMaxPieces, common::ceil_div(block, kPieceRows)));
  const double query_pieces = pieces * static_cast<double>(problem.batch) * static_cast<double>(problem.heads_q) *
                              static_cast<double>(common::ceil_div(problem.seq_q, block));
  const double key_pieces = kMaxPieces * static_cast<double>(problem.batch) * static_cast<double>(problem.heads_kv);
  if (query_pieces + key_pieces > kMax) {
    return "the grid would have more than 2147483647 pieces";
  }
  return "";
}

}  // namespace distr::cuda::grouping
