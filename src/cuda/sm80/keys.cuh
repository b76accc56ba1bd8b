// SPDX-License-Identifier: Apache-2.0
// The tiles of K or k_hat in shared memory, and S = q_hat k_hat^T from them. The two classes have the same interface:
//   copy(source(..), prefetched(), j)      issues the copies of tile j
//   load_members(step), store_sums(j, step)  sum the copied rows into tile j, where groups have several members
//   scores(s, queries, j, part)            computes s = q_hat k_hat_j^T of one part of the keys
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/sm80/config.h"
#include "cuda/sm80/fusion.cuh"
#include "cuda/sm80/queries.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm80 {

// Stands in for values that copy() reads itself because there are no registers to read them ahead.
struct NoPrefetch {};

// Exact attention: tiles [keys][d] of K itself.
template <class C>
class ExactKeys {
 public:
  static constexpr int kFuseSteps = 1;

  __device__ ExactKeys(const ForwardParameters& p, const Work& /*work*/, SharedStorage<C>& storage)
      : p_(p), stages_(stages_address(storage)) {}

  [[nodiscard]] __device__ static const std::uint16_t* source(const ForwardParameters& p, const Work& work) {
    return head_of(p.k, p.problem.k, work.batch, work.head_kv);
  }

  [[nodiscard]] __device__ NoPrefetch prefetched() const { return {}; }

  __device__ void copy(const std::uint16_t* k, NoPrefetch, int j) const {
    const int key = j * C::kKeys;
    const DeviceProblem& problem = p_.problem;
    copy_tile<C::kKeys, C::kDim, C::kThreads>(at(j), row_of(k, problem.k.row, key), problem.k.row,
                                              rows_left(key, problem.seq_k), problem.head_dim);
  }
  __device__ void load_members(int /*step*/) {}
  __device__ void store_sums(int /*j*/, int /*step*/) {}

  template <class Queries>
  __device__ void scores(ScoreFragment<C>& s, const Queries& queries, int j, int part) const {
    const int lane = static_cast<int>(ptx::opaque(threadIdx.x) % 32);
    const std::uint32_t start = at(j).at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    s = {};
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      std::uint32_t a[C::kRowTiles][4];
      queries.fragments(a, step);
#pragma unroll
      for (int n = 0; n < C::kPartKeys / 16; ++n) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4(b, Tile<C::kDim>::move(start, part * C::kPartKeys + n * 16, step * 2));
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_16x8x16(s.of[m][2 * n], a[m], b[0], b[1], typename C::Element{});
          ptx::mma_16x8x16(s.of[m][2 * n + 1], a[m], b[2], b[3], typename C::Element{});
        }
      }
    }
  }

 private:
  [[nodiscard]] __device__ Tile<C::kDim> at(int j) const {
    constexpr std::uint32_t kTileBytes = sizeof(typename SharedStorage<C>::KeyTile);
    return {stages_ + static_cast<std::uint32_t>(j) % C::kStages * kTileBytes};
  }

  const ForwardParameters& p_;
  std::uint32_t stages_;
};

// Grouped attention: tiles [groups][keys] of k_hat^T. Columns of K are rows of K^T, so a group is a sum of rows. In one
// pass the threads copy kRowsPerPass rows of the tile, a chunk of 16 bytes each; in all a thread copies kThreadChunks,
// in the order of the groups. Where groups have several members, the chunks are copied to a raw tile
// [kThreadChunks][kThreads] one tile ahead, and each thread sums those that it copied itself, which needs no barrier.
template <class C>
class GroupedKeys {
 public:
  // The chunks of a part of the keys are summed in so many steps, between those of the second product.
  static constexpr int kFuseSteps = C::kMembers > 1 ? std::clamp(C::kThreadChunks / C::kParts / 2, 1, C::kPartKeys / 16)
                                                    : 1;

  __device__ GroupedKeys(const ForwardParameters& p, const Work& work, SharedStorage<C>& storage)
      : row_offsets_(storage.row_offsets.of), stages_(stages_address(storage)) {
    const DeviceProblem& problem = p.problem;
    const int rows = rows_of_head(p);
    const std::int64_t stride = p.column_stride;
    const std::int32_t* order = p.order + order_index(problem, work.batch, work.head, work.row);
    for (int i = static_cast<int>(threadIdx.x); i < kRowsPerPass * C::kThreadChunks; i += C::kThreads) {
      const int chunk = i % C::kThreadChunks;
      const int group = chunk / C::kMembers * kRowsPerPass + i / C::kThreadChunks;
      const int position = group * C::kMembers + chunk % C::kMembers;
      const bool valid = group < problem.groups && position < rows;
      const int row = !valid ? rows : p.fused ? position : order[position];
      // Below 2^32, as the sequence is below 2^22.
      row_offsets_[i / C::kThreadChunks].of[chunk] = static_cast<std::uint32_t>(row * stride * 2);
    }
    __syncthreads();
  }

  // K^T, or k_hat^T.
  [[nodiscard]] __device__ static const std::uint16_t* source(const ForwardParameters& p, const Work& work) {
    const DeviceProblem& problem = p.problem;
    const std::int64_t head =
        p.fused ? work.batch * problem.heads_q + work.head : work.batch * problem.heads_kv + work.head_kv;
    return static_cast<const std::uint16_t*>(p.k) + head * (rows_of_head(p) + 1) * p.column_stride;
  }

  // The row offsets that copy() needs, read ahead where there are registers for them.
  [[nodiscard]] __device__ auto prefetched() const {
    if constexpr (C::kPrefetchesState) {
      return row_offsets();
    } else {
      return NoPrefetch{};
    }
  }

  __device__ void copy(const std::uint16_t* k, NoPrefetch, int j) const { copy(k, row_offsets(), j); }
  __device__ void copy(const std::uint16_t* k, const RowOffsets<C>& row_offsets, int j) const {
    const unsigned thread = ptx::opaque(threadIdx.x);
    const std::uint32_t to = C::kMembers > 1 ? first_raw_chunk() : first_chunk(thread, j);
    const unsigned key = static_cast<unsigned>(j) * C::kKeys + thread % kRowChunks * kChunk;
    const auto* const start = reinterpret_cast<const char*>(k + key);
#pragma unroll
    for (int n = 0; n < C::kThreadChunks; ++n) {  // they are as far apart in the raw tile as in k_hat^T
      ptx::cp_async_16(to + static_cast<std::uint32_t>(n * C::kThreads * 16), start + row_offsets.of[n], true);
    }
  }

  __device__ void load_members(int step) {
    const std::uint32_t from = first_raw_chunk() + slice_offset(step);
#pragma unroll
    for (int i = 0; i < kGroupsPerStep; ++i) {
#pragma unroll
      for (int member = 0; member < C::kMembers; ++member) {
        const int chunk = group(step, i) * C::kMembers + member;
        members_[i][member] = Words<kWords>::load(from + static_cast<std::uint32_t>(chunk * C::kThreads * 16));
      }
    }
  }

  __device__ void store_sums(int j, int step) {
    const std::uint32_t to = first_chunk(ptx::opaque(threadIdx.x), j) + slice_offset(step);
#pragma unroll
    for (int i = 0; i < kGroupsPerStep; ++i) {
      Words<kWords> k_hat;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        std::uint32_t members[C::kMembers];
#pragma unroll
        for (int member = 0; member < C::kMembers; ++member) {
          members[member] = members_[i][member].of[word];
        }
        k_hat.of[word] = sum<typename C::Element>(members);
      }
      k_hat.store(to + static_cast<std::uint32_t>(group(step, i) * C::kThreads * 16));
    }
  }

  template <class Queries>
  __device__ void scores(ScoreFragment<C>& s, const Queries& queries, int j, int part) const {
    const int lane = static_cast<int>(ptx::opaque(threadIdx.x) % 32);
    const std::uint32_t start = at(j).at(lane % 16, lane / 16);
    s = {};
#pragma unroll
    for (int step = 0; step < C::kGroups / 16; ++step) {
      std::uint32_t a[C::kRowTiles][4];
      queries.fragments(a, step);
#pragma unroll
      for (int n = 0; n < C::kPartKeys / 16; ++n) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Tile<C::kKeys>::move(start, step * 16, part * C::kPartKeys / 8 + n * 2));
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_16x8x16(s.of[m][2 * n], a[m], b[0], b[1], typename C::Element{});
          ptx::mma_16x8x16(s.of[m][2 * n + 1], a[m], b[2], b[3], typename C::Element{});
        }
      }
    }
  }

 private:
  static constexpr int kRowChunks = C::kKeys / kChunk;  // of a row of k_hat^T
  static constexpr int kRowsPerPass = C::kRowsPerPass;
  // The chunks of a step are those of several groups. Where a group has more members than a step has chunks, a step
  // takes one slice of all of the group's chunks instead, so that no fp32 sums have to be kept from step to step.
  static constexpr int kChunksPerStep = C::kMembers > 1 ? C::kThreadChunks / C::kParts / kFuseSteps : 0;
  static constexpr int kSlices = kChunksPerStep < C::kMembers && kChunksPerStep > 0 ? C::kMembers / kChunksPerStep : 1;
  static constexpr int kWords = 4 / kSlices;
  static constexpr int kGroupsPerStep = kChunksPerStep * kSlices / C::kMembers;
  static_assert(kChunksPerStep * C::kParts * kFuseSteps == (C::kMembers > 1 ? C::kThreadChunks : 0));
  static_assert(C::kPartKeys / 16 % kFuseSteps == 0);
  static_assert(kRowsPerPass % 8 == 0);  // so that all rows of a thread have the same swizzle

  [[nodiscard]] __device__ Tile<C::kKeys> at(int j) const {
    constexpr std::uint32_t kTileBytes = sizeof(typename SharedStorage<C>::KeyTile);
    return {stages_ + static_cast<std::uint32_t>(j) % C::kStages * kTileBytes};
  }
  // Loads all offsets before any copy is issued: the compiler puts three instructions between a load and the copy that
  // uses it.
  [[nodiscard]] __device__ RowOffsets<C> row_offsets() const {
    return row_offsets_[ptx::opaque(threadIdx.x) / kRowChunks];
  }
  // The address of this thread's first chunk in the raw tile.
  [[nodiscard]] __device__ std::uint32_t first_raw_chunk() const {
    constexpr std::uint32_t kRaw = offsetof(typename SharedStorage<C>::StageTiles, raw);
    return stages_ + kRaw + ptx::opaque(threadIdx.x) * 16;
  }
  // The offset of this step's slice in a chunk, in bytes. The chunks of 8 threads take all banks, so the next 8 threads
  // take another slice, which avoids bank conflicts.
  [[nodiscard]] __device__ static std::uint32_t slice_offset(int step) {
    return (static_cast<std::uint32_t>(step) ^ (ptx::opaque(threadIdx.x) / 8)) % kSlices * (kWords * 4);
  }
  [[nodiscard]] __device__ static int group(int step, int i) { return step / kSlices * kGroupsPerStep + i; }
  // The address of a thread's first chunk of tile j.
  [[nodiscard]] __device__ std::uint32_t first_chunk(unsigned thread, int j) const {
    return at(j).at(static_cast<int>(thread / kRowChunks), static_cast<int>(thread % kRowChunks));
  }

  // The rows of a head, without the row of zeros behind them.
  [[nodiscard]] __device__ static int rows_of_head(const ForwardParameters& p) {
    return p.fused ? p.problem.groups : p.problem.head_dim;
  }

  RowOffsets<C>* row_offsets_;
  std::uint32_t stages_;
  Words<kWords> members_[std::max(kGroupsPerStep, 1)][C::kMembers];  // of the groups of a step
};

}  // namespace distr::cuda::sm80
