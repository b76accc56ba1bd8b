// SPDX-License-Identifier: Apache-2.0
// The tiles of K or k_hat, and S = q_hat k_hat^T from them. Two kinds with the same face:
//   copy(j)                issues the copies for tile j; where rows must be summed,
//   fetch, store(j, turn)  sum what was copied to the tile
//   scores(s, queries, j)  s += q_hat k_hat_j^T
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm80/config.h"
#include "cuda/sm80/queries.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm80 {

// Exact attention: tiles [keys][d] of K itself.
template <class C>
class ExactKeys {
 public:
  static constexpr int kTurns = 1;

  template <class Work>
  __device__ ExactKeys(const ForwardParameters& p, const Work& work, std::uint32_t stages, void*)
      : p_(p), stages_(stages), k_(head_of(p.k, p.problem.k, work.batch, work.head_kv)) {}

  __device__ void copy(int j) {
    const std::int64_t key = std::int64_t{j} * C::kKeys;
    const DeviceProblem& problem = p_.problem;
    copy_tile<C::kKeys, C::kDim, C::kThreads>(at(j), k_ + key * problem.k.row, problem.k.row,
                                              rows_left(key, problem.seq_k), problem.head_dim);
  }
  __device__ void fetch(int) {}
  __device__ void store(int, int) {}

  template <class Queries>
  __device__ void scores(float (&s)[C::kRowTiles][C::kKeys / 8][4], const Queries& queries, int j) const {
    const int lane = static_cast<int>(ptx::opaque(threadIdx.x)) % 32;
    const std::uint32_t start = at(j).at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      std::uint32_t a[C::kRowTiles][4];
      queries.fragments(a, step);
#pragma unroll
      for (int n = 0; n < C::kKeys / 16; ++n) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4(b, Tile<C::kDim>::move(start, n * 16, step * 2));
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_16x8x16(s[m][2 * n], a[m], b[0], b[1], typename C::Element{});
          ptx::mma_16x8x16(s[m][2 * n + 1], a[m], b[2], b[3], typename C::Element{});
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
  const std::uint16_t* k_;  // of the head
};

// Grouped attention: tiles [groups][keys] of k_hat^T. Columns of K are rows of K^T, so a group is a sum of rows. All
// threads together take kRowsAPass rows of the tile at once, 16 bytes each; a thread's pieces of K^T are its slots,
// group after group. Where groups have several members the slots are copied to a raw tile [kSlots][kThreads], one tile
// ahead; each thread sums its own, so that they cost no barrier.
template <class C>
class GroupedKeys {
 public:
  static constexpr int kTurns = C::kMembers > 1 ? std::min(C::kKeys / 16, C::kSlots) : 1;  // in which slots are summed

  template <class Work>
  __device__ GroupedKeys(const ForwardParameters& p, const Work& work, std::uint32_t stages, void* shared)
      : stages_(stages), raw_(stages + C::kStageBytes + threadIdx.x * 16) {
    const DeviceProblem& problem = p.problem;
    const std::int64_t head =
        p.fused ? work.batch * problem.heads_q + work.head : work.batch * problem.heads_kv + work.head_kv;
    const int rows = p.fused ? problem.groups : problem.head_dim;  // the row after them is zero
    const std::int64_t stride = p.column_stride;
    const auto* k = static_cast<const std::uint16_t*>(p.k) + head * (rows + 1) * stride;
    const std::int32_t* order = p.order + order_index(problem, work.batch, work.head, work.row);
    auto* const table = static_cast<std::uint8_t*>(sm80::table<C>(shared));
    auto* const sources = reinterpret_cast<std::uint32_t*>(table + 8);
    if (threadIdx.x == 0) {
      *reinterpret_cast<const std::uint16_t**>(table) = k;
    }
    for (int i = static_cast<int>(threadIdx.x); i < kRowsAPass * C::kSlots; i += C::kThreads) {
      const int slot = i % C::kSlots;
      const int group = slot / C::kMembers * kRowsAPass + i / C::kSlots;
      const int position = group * C::kMembers + slot % C::kMembers;
      const bool valid = group < problem.groups && position < rows;
      const int row = !valid ? rows : p.fused ? position : order[position];
      sources[i] = static_cast<std::uint32_t>(row * stride * 2);  // below 2^32, as the sequence is below 2^22
    }
    table_ = ptx::shared_address(table);
    __syncthreads();
  }

  __device__ void copy(int j) const {
    const int thread = static_cast<int>(ptx::opaque(threadIdx.x));
    const std::uint32_t to = C::kMembers > 1 ? raw_ : slot_of(thread, j);
    const int key = j * C::kKeys + thread % kChunks * kChunk;
    const std::uint32_t from = table_ + 8 + static_cast<std::uint32_t>(thread / kChunks * C::kSlots * 4);
    const auto* const start = reinterpret_cast<const std::uint16_t*>(ptx::load_shared_8(table_)) + key;
#pragma unroll
    for (int slot = 0; slot < C::kSlots; ++slot) {  // a slot of either tile takes as many bytes
      const auto* const source = reinterpret_cast<const char*>(start) + ptx::load_shared_4(from + slot * 4);
      ptx::cp_async_16(to + static_cast<std::uint32_t>(slot * C::kThreads * 16), source, true);
    }
  }

  __device__ void fetch(int turn) {
#pragma unroll
    for (int i = 0; i < kSlotsATurn; ++i) {
      const int slot = turn * kSlotsATurn + i;
      slots_[i] = ptx::load_shared_16(raw_ + static_cast<std::uint32_t>(slot * C::kThreads * 16));
    }
  }

  __device__ void store(int j, int turn) {
#pragma unroll
    for (int i = 0; i < kSlotsATurn; ++i) {
      const int slot = turn * kSlotsATurn + i;
      const int member = slot % C::kMembers;
      sum_ = member == 0 ? slots_[i] : add8<typename C::Element>(sum_, slots_[i]);
      if (member == C::kMembers - 1) {
        const auto pass = static_cast<std::uint32_t>(slot / C::kMembers * C::kThreads * 16);
        ptx::store_shared_16(slot_of(static_cast<int>(ptx::opaque(threadIdx.x)), j) + pass, sum_);
      }
    }
  }

  template <class Queries>
  __device__ void scores(float (&s)[C::kRowTiles][C::kKeys / 8][4], const Queries& queries, int j) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t start = at(j).at(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < C::kGroups / 16; ++step) {
      std::uint32_t a[C::kRowTiles][4];
      queries.fragments(a, step);
#pragma unroll
      for (int n = 0; n < C::kKeys / 16; ++n) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Tile<C::kKeys>::move(start, step * 16, n * 2));
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_16x8x16(s[m][2 * n], a[m], b[0], b[1], typename C::Element{});
          ptx::mma_16x8x16(s[m][2 * n + 1], a[m], b[2], b[3], typename C::Element{});
        }
      }
    }
  }

 private:
  static constexpr int kChunks = C::kKeys / kChunk;  // of a row of k_hat^T
  static constexpr int kRowsAPass = C::kRowsAPass;
  // To sum. Without the fusion what is left of Q's copy serves for k_hat.
  static constexpr int kSlotsATurn = C::kMembers > 1 && C::kWithout != Without::fusion ? C::kSlots / kTurns : 0;
  static_assert(kRowsAPass % 8 == 0);  // so that a thread's rows are swizzled alike

  [[nodiscard]] __device__ Tile<C::kKeys> at(int j) const {
    return {stages_ + static_cast<std::uint32_t>(j) % C::kStages * C::kKeyBytes};
  }
  // A thread's first slot of tile j.
  [[nodiscard]] __device__ std::uint32_t slot_of(int thread, int j) const {
    return at(j).at(thread / kChunks, thread % kChunks);
  }

  std::uint32_t table_;  // where K^T begins, and then [kRowsAPass, kSlots]: how far from there the row of a slot begins
  std::uint32_t stages_, raw_;  // the latter: of this thread's first slot
  uint4 slots_[std::max(kSlotsATurn, 1)];
  uint4 sum_{};  // of the members so far
};

}  // namespace distr::cuda::sm80
