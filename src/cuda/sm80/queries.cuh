// SPDX-License-Identifier: Apache-2.0
// Q or q_hat of a thread block in shared memory, which is the left operand of the mma.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/sm80/config.h"
#include "cuda/sm80/storage.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm80 {

// Issues this thread's copies of a tile of kRows rows of kColumns elements: a chunk of the first row that it has, from
// `from` to `to`, and of every row kThreads / kChunks behind that. Rows from `rows` on become 0, counted from its
// first.
template <int kRows, int kColumns, int kThreads>
__device__ inline void copy_chunks(std::uint32_t to, const char* from, unsigned row_bytes, int rows) {
  constexpr int kChunks = kColumns / kChunk;
  constexpr int kRowsPerPass = kThreads / kChunks;
  // A pass has a power of two of rows, the thread's first row is less than that, and `row` is a multiple of it. Adding
  // `row` therefore only sets bits of the row's number, and move() can apply their part of the swizzle to the address.
  static_assert(kRows % kRowsPerPass == 0);
  static_assert(std::has_single_bit(static_cast<unsigned>(kRowsPerPass)));
  static_assert(kRowsPerPass % 8 == 0 || kChunks >= 8);
#pragma unroll
  for (int row = 0; row < kRows; row += kRowsPerPass) {
    ptx::cp_async_16(Tile<kColumns>::move(to, row, row % 8), from, row < rows);
    from += kRowsPerPass * row_bytes;
  }
}

// Issues the copies of kRows rows of kColumns elements each. Rows from `rows` on and columns from `columns` on become
// 0.
template <int kRows, int kColumns, int kThreads>
__device__ inline void copy_tile(Tile<kColumns> tile, const void* source, std::int64_t stride, int rows, int columns) {
  constexpr int kChunks = kColumns / kChunk;
  const unsigned thread = ptx::opaque(threadIdx.x);
  const auto first = static_cast<int>(thread / kChunks);
  const auto chunk = static_cast<int>(thread % kChunks);
  const int rows_there = chunk * kChunk < columns ? rows - first : 0;
  // Registers are scarce: the tile's address is the same for all threads, and 32-bit offsets reach any of its rows.
  const auto row_bytes = static_cast<unsigned>(stride * 2);
  const char* const from = static_cast<const char*>(source) + (first * row_bytes + chunk * 16);
  copy_chunks<kRows, kColumns, kThreads>(tile.at(first, chunk), from, row_bytes, rows_there);
}

// The rows from `begin` to `end`, which are both below 2^22. In 32 bits the difference costs half as much.
[[nodiscard]] __device__ inline int rows_left(int begin, std::int64_t end) { return static_cast<int>(end) - begin; }

// Where a row of a head begins. Rows are less than 2^24 elements apart (suits_cp_async()).
[[nodiscard]] __device__ inline const std::uint16_t* row_of(const std::uint16_t* head, std::int64_t stride, int row) {
  return head + static_cast<std::uint64_t>(static_cast<unsigned>(row)) * static_cast<unsigned>(stride);
}

// Where a head of K or V begins.
[[nodiscard]] __device__ inline const std::uint16_t* head_of(const void* tensor, const Strides& strides, int batch,
                                                             int head) {
  return static_cast<const std::uint16_t*>(tensor) + batch * strides.batch + head * strides.head;
}

// Where the order of a query's block begins.
[[nodiscard]] __device__ inline std::int64_t order_index(const DeviceProblem& problem, int batch, int head, int row) {
  return ((batch * problem.heads_q + head) * problem.blocks + static_cast<unsigned>(row) / problem.rows_of_block) *
         problem.head_dim;
}

template <class C>
[[nodiscard]] __device__ inline const std::uint16_t* query_rows(const ForwardParameters& p, const Work& work) {
  return static_cast<const std::uint16_t*>(p.q) + work.batch * p.problem.q.batch + work.head * p.problem.q.head +
         work.row * p.problem.q.row;
}

// The same where rows are those of several heads.
template <class C>
__device__ inline void copy_rows_of_heads(Tile<C::kDim> tile, const ForwardParameters& p, const Work& work) {
  constexpr int kChunks = C::kDim / kChunk;
  const DeviceProblem& problem = p.problem;
  for (int n = static_cast<int>(threadIdx.x); n < C::kRows * kChunks; n += C::kThreads) {
    const int row = n / kChunks;
    const int chunk = n % kChunks;
    const RowPlace at = place_of<C>(p, work.head, work.row + row);
    const bool is_there = work.row + row < p.row_end && chunk * kChunk < problem.head_dim;
    const std::int64_t offset = at.head * problem.q.head + at.query * problem.q.row + chunk * kChunk;
    ptx::cp_async_16(tile.at(row, chunk), static_cast<const std::uint16_t*>(p.q) + (is_there ? offset : 0), is_there);
  }
}

// Exact attention: Q itself.
template <class C>
class ExactQueries {
 public:
  __device__ ExactQueries(const ForwardParameters& p, const Work& work, SharedStorage<C>& storage, int warp_row)
      : start_(Tile<C::kDim>{ptx::shared_address(&storage)}.at(warp_row + static_cast<int>(threadIdx.x) % 16,
                                                               static_cast<int>(threadIdx.x) % 32 / 16)) {
    const Tile<C::kDim> tile{ptx::shared_address(&storage)};
    if constexpr (C::kSequences) {
      copy_rows_of_heads<C>(tile, p, work);
    } else {
      copy_tile<C::kRows, C::kDim, C::kThreads>(tile, query_rows<C>(p, work), p.problem.q.row,
                                                rows_left(work.row, p.row_end), p.problem.head_dim);
    }
  }

  // Loads the columns 16 step .. 16 step + 15 of this warp's rows into `a`.
  __device__ void fragments(std::uint32_t (&a)[C::kRowTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      ptx::ldmatrix_x4(a[m], Tile<C::kDim>::move(start_, m * 16, step * 2));
    }
  }

 private:
  std::uint32_t start_;  // this lane's part of the first fragment
};

// Grouped attention: q_hat, which is estimated once from a copy of Q (method, 2.4).
template <class C>
class GroupedQueries {
 public:
  __device__ GroupedQueries(const ForwardParameters& p, const Work& work, SharedStorage<C>& storage, int warp_row) {
    using T = typename C::Element;
    const DeviceProblem& problem = p.problem;
    const Tile<C::kGroups> estimate{ptx::shared_address(&storage)};
    constexpr std::uint32_t kQueryCopy = offsetof(SharedStorage<C>, query_copy);
    const Tile<C::kDim> raw{estimate.base + kQueryCopy};
    copy_tile<C::kRows, C::kDim, C::kThreads>(raw, query_rows<C>(p, work), problem.q.row,
                                              rows_left(work.row, p.row_end), problem.head_dim);
    ptx::cp_async_commit();
    // A thread computes one group's column of q_hat for every kApart-th row. Neighbouring threads have neighbouring
    // groups.
    static_assert(C::kThreads % C::kGroups == 0);
    constexpr int kApart = C::kThreads / C::kGroups;
    const auto thread = static_cast<int>(ptx::opaque(threadIdx.x));
    const int group = thread % C::kGroups;
    const int first_row = thread / C::kGroups;
    const int first = group * problem.members;
    const int size = group < problem.groups ? min(problem.members, problem.head_dim - first) : 0;
    const int sampled = problem.mean ? size : min(size, 1);
    const std::int32_t* const columns = p.order + order_index(problem, work.batch, work.head, work.row) + first;
    const auto at = [&](std::uint32_t address) {
      return reinterpret_cast<T*>(storage.queries.bytes + (address - estimate.base));  // or behind, in query_copy
    };
    const float factor = p.query_scale / static_cast<float>(max(sampled, 1));
    int column = sampled > 0 ? columns[0] : 0;
    float sums[C::kRows / kApart] = {};
    ptx::cp_async_wait<0>();
    __syncthreads();
    for (int member = 0; member < sampled; ++member) {
      const int next = member + 1 < sampled ? columns[member + 1] : 0;
#pragma unroll
      for (int i = 0; i < C::kRows / kApart; ++i) {
        sums[i] += static_cast<float>(at(raw.at(first_row + i * kApart, column / kChunk))[column % kChunk]);
      }
      column = next;
    }
#pragma unroll
    for (int i = 0; i < C::kRows / kApart; ++i) {
      at(estimate.at(first_row + i * kApart, group / kChunk))[group % kChunk] = T(sums[i] * factor);
    }
    __syncthreads();
    start_ = estimate.at(warp_row + static_cast<int>(threadIdx.x) % 16, static_cast<int>(threadIdx.x) % 32 / 16);
  }

  __device__ void fragments(std::uint32_t (&a)[C::kRowTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      ptx::ldmatrix_x4(a[m], Tile<C::kGroups>::move(start_, m * 16, step * 2));
    }
  }

 private:
  std::uint32_t start_;  // this lane's part of the first fragment
};

}  // namespace distr::cuda::sm80
