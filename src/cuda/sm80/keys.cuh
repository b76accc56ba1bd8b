// SPDX-License-Identifier: Apache-2.0
// The tiles of K or k_hat in shared memory, and S = q_hat k_hat^T from them. The two classes have the same interface:
//   copy(source(..), prefetched(), j)  issues the copies of tile j
//   fetch(turn), store(j, turn)   sum the copied rows into tile j, where groups have several members
//   scores(s, queries, j, part)   computes s = q_hat k_hat_j^T of one part of the keys
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm80/config.h"
#include "cuda/sm80/fusion.cuh"
#include "cuda/sm80/queries.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm80 {

// Stands in for values that copy() reads itself because there are no registers to read them ahead.
struct NoPrefetch {};

// Exact attention: tiles [keys][d] of K itself.
template <class C>
class ExactKeys {
 public:
  static constexpr int kTurns = 1;

  template <class Work>
  __device__ ExactKeys(const ForwardParameters& p, const Work&, std::uint32_t stages, void*) : p_(p), stages_(stages) {}

  template <class Work>
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
  __device__ void fetch(int) {}
  __device__ void store(int, int) {}

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
    return {stages_ + static_cast<std::uint32_t>(j) % C::kStages * C::kKeyBytes};
  }

  const ForwardParameters& p_;
  std::uint32_t stages_;
};

// Where the rows of K^T begin that a thread copies, one for each of its slots, in bytes from the beginning of K^T.
template <class C>
struct alignas(C::kSlots % 4 == 0 ? 16 : C::kSlots * 4) RowOffsets {
  std::uint32_t of[C::kSlots];
};

// Grouped attention: tiles [groups][keys] of k_hat^T. Columns of K are rows of K^T, so a group is a sum of rows. In one
// pass the threads copy kRowsPerPass rows of the tile, 16 bytes each. The 16-byte pieces that one thread copies are its
// slots, in the order of the groups. Where groups have several members, the slots are copied to a raw tile
// [kSlots][kThreads] one tile ahead, and each thread sums the slots that it copied itself, which needs no barrier.
template <class C>
class GroupedKeys {
 public:
  // The slots of a part of the keys are summed in so many turns.
  static constexpr int kTurns = C::kMembers > 1 ? std::clamp(C::kSlots / C::kParts / 2, 1, C::kPartKeys / 16) : 1;

  template <class Work>
  __device__ GroupedKeys(const ForwardParameters& p, const Work& work, std::uint32_t stages, void* shared)
      : row_offsets_(reinterpret_cast<RowOffsets<C>*>(static_cast<std::uint8_t*>(shared) + C::kSharedBytes -
                                                      C::kStateBytes - C::kTableBytes)),
        stages_(stages) {
    static_assert(kRowsPerPass * sizeof(RowOffsets<C>) == C::kTableBytes);
    const DeviceProblem& problem = p.problem;
    const int rows = rows_of_head(p);
    const std::int64_t stride = p.column_stride;
    const std::int32_t* order = p.order + order_index(problem, work.batch, work.head, work.row);
    for (int i = static_cast<int>(threadIdx.x); i < kRowsPerPass * C::kSlots; i += C::kThreads) {
      const int slot = i % C::kSlots;
      const int group = slot / C::kMembers * kRowsPerPass + i / C::kSlots;
      const int position = group * C::kMembers + slot % C::kMembers;
      const bool valid = group < problem.groups && position < rows;
      const int row = !valid ? rows : p.fused ? position : order[position];
      // Below 2^32, as the sequence is below 2^22.
      row_offsets_[i / C::kSlots].of[slot] = static_cast<std::uint32_t>(row * stride * 2);
    }
    __syncthreads();
  }

  // K^T, or k_hat^T.
  template <class Work>
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
    const std::uint32_t to = C::kMembers > 1 ? raw() : slot_of(thread, j);
    const unsigned key = static_cast<unsigned>(j) * C::kKeys + thread % kChunks * kChunk;
    const auto* const start = reinterpret_cast<const char*>(k + key);
#pragma unroll
    for (int slot = 0; slot < C::kSlots; ++slot) {  // slots are as far apart in the raw tile as in k_hat^T
      ptx::cp_async_16(to + static_cast<std::uint32_t>(slot * C::kThreads * 16), start + row_offsets.of[slot], true);
    }
  }

  __device__ void fetch(int turn) {
    const std::uint32_t from = raw() + piece(turn);
#pragma unroll
    for (int i = 0; i < kGroupsPerTurn; ++i) {
#pragma unroll
      for (int member = 0; member < C::kMembers; ++member) {
        const int slot = group(turn, i) * C::kMembers + member;
        members_[i][member] = Words<kWords>::load(from + static_cast<std::uint32_t>(slot * C::kThreads * 16));
      }
    }
  }

  __device__ void store(int j, int turn) {
    const std::uint32_t to = slot_of(ptx::opaque(threadIdx.x), j) + piece(turn);
#pragma unroll
    for (int i = 0; i < kGroupsPerTurn; ++i) {
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
      k_hat.store(to + static_cast<std::uint32_t>(group(turn, i) * C::kThreads * 16));
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
  static constexpr int kChunks = C::kKeys / kChunk;  // of a row of k_hat^T
  static constexpr int kRowsPerPass = C::kRowsPerPass;
  // The slots of a turn are those of several groups. Where a group has more members than a turn has slots, a turn takes
  // one piece of all of the group's slots instead, so that no fp32 sums have to be kept from one turn to the next.
  static constexpr int kSlotsPerTurn = C::kMembers > 1 ? C::kSlots / C::kParts / kTurns : 0;
  static constexpr int kPieces = kSlotsPerTurn < C::kMembers && kSlotsPerTurn > 0 ? C::kMembers / kSlotsPerTurn : 1;
  static constexpr int kWords = 4 / kPieces;
  static constexpr int kGroupsPerTurn = kSlotsPerTurn * kPieces / C::kMembers;
  static_assert(kSlotsPerTurn * C::kParts * kTurns == (C::kMembers > 1 ? C::kSlots : 0));
  static_assert(C::kPartKeys / 16 % kTurns == 0);
  static_assert(kRowsPerPass % 8 == 0);  // so that all rows of a thread have the same swizzle

  [[nodiscard]] __device__ Tile<C::kKeys> at(int j) const {
    return {stages_ + static_cast<std::uint32_t>(j) % C::kStages * C::kKeyBytes};
  }
  // Loads all offsets before any copy is issued: the compiler puts three instructions between a load and the copy that
  // uses it.
  [[nodiscard]] __device__ RowOffsets<C> row_offsets() const {
    return row_offsets_[ptx::opaque(threadIdx.x) / kChunks];
  }
  // This thread's first slot in the raw tile.
  [[nodiscard]] __device__ std::uint32_t raw() const {
    return stages_ + C::kStageBytes + ptx::opaque(threadIdx.x) * 16;
  }
  // The offset of this turn's piece in a slot, in bytes. The slots of 8 threads take all banks, so the next 8 threads
  // take another piece, which avoids bank conflicts.
  [[nodiscard]] __device__ static std::uint32_t piece(int turn) {
    return (static_cast<std::uint32_t>(turn) ^ (ptx::opaque(threadIdx.x) / 8)) % kPieces * (kWords * 4);
  }
  [[nodiscard]] __device__ static int group(int turn, int i) { return turn / kPieces * kGroupsPerTurn + i; }
  // A thread's first slot of tile j.
  [[nodiscard]] __device__ std::uint32_t slot_of(unsigned thread, int j) const {
    return at(j).at(static_cast<int>(thread / kChunks), static_cast<int>(thread % kChunks));
  }

  // The rows of a head, without the row of zeros behind them.
  [[nodiscard]] __device__ static int rows_of_head(const ForwardParameters& p) {
    return p.fused ? p.problem.groups : p.problem.head_dim;
  }

  RowOffsets<C>* row_offsets_;  // [kRowsPerPass], towards the end of shared memory
  std::uint32_t stages_;
  Words<kWords> members_[std::max(kGroupsPerTurn, 1)][C::kMembers];  // of the groups of a turn
};

}  // namespace distr::cuda::sm80
