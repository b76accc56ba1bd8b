// SPDX-License-Identifier: Apache-2.0
// Tiles of k_hat^T of a block's own grouping by energy, made from K^T as they are needed (paper, Section 3.3: the
// fusion on chip). Its groups have one member, so a row of k_hat^T is a row of K^T.
//
//   All threads of the copying warpgroup together copy kRowsAPass rows of a tile [columns][keys] at once, 8 keys each;
//   a thread's rows are its slots. What they copied becomes visible to wgmma by a proxy fence, before the tile is full:
//   a tile is published when the next one is on its way.
#pragma once

#include <cstddef>

#include "cuda/rows.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {

template <class C>
class PickedKeys {
 public:
  static constexpr bool kByOneThread = false;

  __device__ PickedKeys(const ForwardParameters& p, const Rows& work) : last_(p.column_stride - kChunk) {
    const DeviceProblem& problem = p.problem;
    const int columns = problem.head_dim;  // the row of K^T after them is zero
    const std::int64_t query_head = work.batch * problem.heads_q + work.head;
    const std::int32_t* order =
        p.order + (query_head * problem.blocks + static_cast<unsigned>(work.row) / problem.rows_of_block) * columns;
    // A warp's rows by a table of its own, so that it needs no barrier: loads straight to registers cost too many.
    constexpr int kWarpRows = kRowsAPass * 32 / C::kWarpgroup;
    const int first = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
    __shared__ unsigned sources[C::kColumns];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32; i < kSlots * kWarpRows; i += 32) {
      const int group = i / kWarpRows * kRowsAPass + first + i % kWarpRows;
      sources[group] = static_cast<unsigned>(group < problem.groups ? order[group] : columns) *
                       static_cast<unsigned>(p.column_stride * sizeof(typename C::Element));
    }
    __syncwarp();
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      sources_[slot] = sources[slot * kRowsAPass + static_cast<int>(threadIdx.x) / kChunks];
    }
    const std::int64_t head = work.batch * problem.heads_kv + work.head_kv;
    k_ = static_cast<const std::uint16_t*>(p.keys_transposed) + head * (columns + 1) * p.column_stride;
  }

  // row: the first key of the tile. What is read past the last key is hidden by the mask, and need not be this row.
  __device__ void fill(std::uint32_t tile, std::uint32_t full, int row) {
    if constexpr (C::kWithout != Without::fusion) {
      const std::int64_t key = min(std::int64_t{row} + static_cast<int>(threadIdx.x) % kChunks * kChunk, last_);
      const std::byte* const keys =
          ptx::opaque(reinterpret_cast<const std::byte*>(k_ + key));  // else it is made anew for every row
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        ptx::cp_async_16(place(tile, slot), keys + sources_[slot], true);
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
  static constexpr int kChunks = C::kKeys / kChunk;  // of a row
  static constexpr int kRowsAPass = C::kWarpgroup / kChunks;
  static constexpr int kSlots = C::kColumns / kRowsAPass;

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

  __device__ void publish_last() const {
    if (last_full_ == 0) {
      return;
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::barrier_arrive(last_full_);
    }
  }

  const std::uint16_t* k_;       // K^T of the head
  std::int64_t last_;            // where the last 8 keys of a row begin
  std::uint32_t last_full_ = 0;  // of the tile before
  unsigned sources_[kSlots];     // where this thread's rows of K^T begin, in bytes
};

}  // namespace distr::cuda::sm90
