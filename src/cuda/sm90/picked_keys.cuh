// SPDX-License-Identifier: Apache-2.0
// Tiles of k_hat^T of a block's own grouping, made from K^T as they are needed (paper, Section 3.3: the fusion on
// chip). A row of k_hat^T is the sum of a pair of rows of K^T; for energy, whose groups have one member, it is a row of
// K^T.
//
//   All threads of the copying warpgroup together make kRowsAPass rows of a tile [columns][keys] at once, 8 keys each;
//   a thread's rows are its slots. What they store becomes visible to wgmma by a proxy fence, before the tile is full.
#pragma once

#include <cstddef>

#include "cuda/rows.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {

// What both kinds below share: where the rows of K^T begin, and where a thread's slots lie.
template <class C>
class KeyRows {
 public:
  static constexpr bool kByOneThread = false;
  static constexpr unsigned kArrivals = C::kWarpgroup / 32;  // that make a tile full

  __device__ KeyRows(const ForwardParameters& p, const Rows& work) : last_(p.column_stride - kChunk) {
    const DeviceProblem& problem = p.problem;
    const int columns = problem.head_dim;  // the row of K^T after them is zero
    const std::int64_t query_head = work.batch * problem.heads_q + work.head;
    const std::int32_t* order =
        p.order + (query_head * problem.blocks + static_cast<unsigned>(work.row) / problem.rows_of_block) * columns;
    // A warp makes its rows of the tile by itself, so that this table needs no barrier.
    constexpr int kWarpRows = kRowsAPass * 32 / C::kWarpgroup;
    const int first = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
    __shared__ __align__(8) unsigned sources[C::kColumns * C::kMembers];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32; i < kSlots * kWarpRows * C::kMembers; i += 32) {
      const int group = i / (kWarpRows * C::kMembers) * kRowsAPass + first + i / C::kMembers % kWarpRows;
      const int position = group * C::kMembers + i % C::kMembers;
      const bool valid = group < problem.groups && position < columns;
      sources[position] = static_cast<unsigned>(valid ? order[position] : columns) *
                          static_cast<unsigned>(p.column_stride * sizeof(typename C::Element));
    }
    __syncwarp();
    sources_ = ptx::shared_address(sources) +
               static_cast<std::uint32_t>(threadIdx.x / kChunks * C::kMembers * sizeof(unsigned));
    const std::int64_t head = work.batch * problem.heads_kv + work.head_kv;
    k_ = static_cast<const std::uint16_t*>(p.keys_transposed) + head * (columns + 1) * p.column_stride;
  }

 protected:
  static constexpr int kChunks = C::kKeys / kChunk;  // of a row
  static constexpr int kRowsAPass = C::kWarpgroup / kChunks;
  static constexpr int kSlots = C::kColumns / kRowsAPass;

  // This thread's part of a row of K^T. What is read past the last key is hidden by the mask, and need not be this row.
  [[nodiscard]] __device__ const std::byte* keys_from(int row) const {
    const std::int64_t key = min(std::int64_t{row} + static_cast<int>(threadIdx.x) % kChunks * kChunk, last_);
    return ptx::opaque(reinterpret_cast<const std::byte*>(k_ + key));  // else it is made anew for every row
  }
  // Where in shared memory it says, in bytes, where the members of a slot's group begin, one after another.
  [[nodiscard]] __device__ std::uint32_t sources(int slot) const {
    return sources_ + static_cast<std::uint32_t>(slot * kRowsAPass * C::kMembers * static_cast<int>(sizeof(unsigned)));
  }
  // Where a slot of this thread lies.
  [[nodiscard]] __device__ static std::uint32_t place(std::uint32_t tile, int slot) {
    constexpr unsigned kPieces = 8;  // of 16 bytes in a row of a panel, permuted by the row's number
    const unsigned row = threadIdx.x / kChunks;
    const unsigned piece = threadIdx.x % kChunks;
    const std::uint32_t first = tile + piece / kPieces * C::KeyTile::kPanelBytes + row * C::KeyTile::kRowBytes +
                                (piece % kPieces ^ row % kPieces) * 16;
    const auto later = static_cast<unsigned>(slot * kRowsAPass);
    return (first ^ later % kPieces * 16) + later * C::KeyTile::kRowBytes;
  }
  __device__ static void publish(std::uint32_t full) {
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::barrier_arrive(full);
    }
  }

 private:
  const std::uint16_t* k_;  // K^T of the head
  std::int64_t last_;       // where the last 8 keys of a row begin
  std::uint32_t sources_;   // of this thread's slots
};

// Groups of one member: rows of K^T are copied. A tile is published when the next one is on its way.
template <class C>
class PickedKeys : KeyRows<C> {
  using Base = KeyRows<C>;

 public:
  using Base::kArrivals;
  using Base::kByOneThread;

  __device__ PickedKeys(const ForwardParameters& p, const Rows& work, int /*row*/) : Base(p, work) {
#pragma unroll
    for (int slot = 0; slot < Base::kSlots; ++slot) {
      sources_[slot] = ptx::load_shared_4(Base::sources(slot));
    }
  }

  __device__ void fill(std::uint32_t tile, std::uint32_t full, int row) {
    if constexpr (C::kWithout != Without::fusion) {
      const std::byte* const keys = Base::keys_from(row);
#pragma unroll
      for (int slot = 0; slot < Base::kSlots; ++slot) {
        ptx::cp_async_16(Base::place(tile, slot), keys + sources_[slot], true);
      }
      ptx::cp_async_commit();
      ptx::cp_async_wait<1>();
    }
    publish_last();
    last_full_ = full;
  }

  // What is still on its way.
  __device__ void finish() {
    ptx::cp_async_wait<0>();
    publish_last();
  }

 private:
  __device__ void publish_last() const {
    if (last_full_ != 0) {
      Base::publish(last_full_);
    }
  }

  std::uint32_t last_full_ = 0;     // of the tile before, which is published when the next is on its way
  unsigned sources_[Base::kSlots];  // of all tiles: loads from shared memory stand in MUFU's way
};

// Pairs: their rows come to registers kAhead slots before they are added, also those of the next tile. A sum is rounded
// once. Larger groups are several columns of k_hat, one for each pair, with the same q_hat (forward_launch.cu): sums of
// four rows, made in fp32, cost 3 times as many instructions, and more than the columns that they save.
template <class C>
class FusedKeys : KeyRows<C> {
  using Base = KeyRows<C>;

 public:
  using Base::kArrivals;
  using Base::kByOneThread;

  // `row`: the first key of the first tile.
  __device__ FusedKeys(const ForwardParameters& p, const Rows& work, int row) : Base(p, work) {
    const std::byte* const keys = Base::keys_from(row);
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      fetch(slot, keys);
    }
  }

  __device__ void fill(std::uint32_t tile, std::uint32_t full, int row) {
    if constexpr (C::kWithout != Without::fusion) {
      const std::byte* const keys = Base::keys_from(row);
      const std::byte* const next_keys = Base::keys_from(max(row - C::kKeys, 0));
#pragma unroll
      for (int slot = 0; slot < Base::kSlots; ++slot) {
        const uint4 sum = add8<typename C::Element>(rows_[slot % kAhead][0], rows_[slot % kAhead][1]);
        fetch((slot + kAhead) % Base::kSlots, slot + kAhead < Base::kSlots ? keys : next_keys);
        ptx::store_shared_16(Base::place(tile, slot), sum);
      }
    }
    Base::publish(full);
  }
  __device__ void finish() {}

 private:
  static_assert(C::kMembers == 2);
  static constexpr int kAhead = 4;
  static_assert(Base::kSlots % kAhead == 0);

  __device__ void fetch(int slot, const std::byte* keys) {
    const std::uint64_t sources = ptx::load_shared_8(Base::sources(slot));  // one load for both
    // Not plain loads, which spill in fp16 at d = 64; in the SASS these are behind wait_for_inputs() (early.cuh).
    const auto row = [&](unsigned source) { return __ldg(reinterpret_cast<const uint4*>(keys + source)); };
    rows_[slot % kAhead][0] = row(static_cast<unsigned>(sources));
    rows_[slot % kAhead][1] = row(static_cast<unsigned>(sources >> 32));
  }

  uint4 rows_[kAhead][C::kMembers];
};

}  // namespace distr::cuda::sm90
