// SPDX-License-Identifier: Apache-2.0
// Tiles of k_hat^T of a block's own grouping by energy, gathered from K^T as they are needed (paper, Section 3.3: the
// fusion on chip). Its groups have one member, so a row of k_hat^T is a row of K^T.
//
//   All threads of the producer warpgroup together copy kRowsPerPass rows of a tile [columns][keys] at once by
//   cp.async, 8 keys each. What they copied becomes visible to wgmma by a proxy fence, before the tile is full: a tile
//   is published when the next one is on its way.
#pragma once

#include <cstddef>

#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tma_keys.cuh"
#include "cuda/tile.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

template <class C>
class Gatherer;

struct GatherKeys {
  static constexpr KeyLoad kLoad = KeyLoad::gather;
  static constexpr int kProducers = 1;
  static constexpr int stages(int /*values*/) { return 3; }
  static constexpr unsigned kArrivals = kWarpgroup / 32;  // that make a tile full: of the warps that gather it
  static constexpr unsigned kValueArrivals = 1;           // of V
  static constexpr bool kTransposed = true;
  static constexpr Registers registers(int /*consumers*/) { return {40, 232}; }

  template <int kColumns, int kKeys>
  using KeyTile = Panels<kColumns, kKeys>;
  template <class C>
  using LoadsOfConsumer = NoLoads;
  template <class C>
  struct Storage {
    unsigned row_of[C::kColumns];  // where the rows of K^T begin that a tile has, in bytes
  };
  struct Barriers {};

  template <class C>
  __device__ static void init_barriers(const Shared<C>& /*shared*/) {}

  template <class C>
  __device__ static void produce(const Pass<C>& pass) {
    const bool issues = is_first_warp() && ptx::elect_one_sync();
    if (pass.used == 0 && issues) {
      load_queries(pass);
    }
    load_tiles(pass);
    if (pass.used == 0 && issues) {
      prefetch_next<C>(pass.p);
    }
  }
  // By all threads of the warpgroup.
  template <class C>
  __device__ __forceinline__ static void load_tiles(const Pass<C>& pass) {
    Gatherer<C> gatherer(pass);
#pragma unroll 1
    for (int n = 0; n < pass.tiles; ++n) {
      const auto state = pass.state(n);
      wait_empty(pass.shared.keys_empty(state.stage), state.phase);
      gatherer.load(state.stage, [&](int chunk) { return std::int64_t{pass.first_key(n)} + chunk * kChunk; });
      if (is_first_warp() && ptx::elect_one_sync()) {
        load_values(pass, n);
      }
      __syncwarp();
    }
    gatherer.finish();
  }

  template <class C>
  __device__ static void prefetch(const ForwardParameters& /*p*/, const WorkTile& /*next*/) {}
};

template <class C>
class Gatherer {
 public:
  __device__ __forceinline__ explicit Gatherer(const Pass<C>& pass)
      : shared_(pass.shared), last_(pass.p.column_stride - kChunk) {
    const ForwardParameters& p = pass.p;
    const DeviceProblem& problem = p.problem;
    const WorkTile& work = pass.work;
    const int columns = problem.head_dim;  // the row of K^T after them is zero
    const std::int64_t query_head = work.batch * problem.heads_q + work.head;
    const std::int32_t* const order =
        p.order + (query_head * problem.blocks + static_cast<unsigned>(work.row) / problem.rows_of_block) * columns;
    // A warp's rows by a part of the table that no other warp has, so that it needs no barrier: loads straight to
    // registers cost too many.
    constexpr int kWarpRows = kRowsPerPass * 32 / kWarpgroup;
    const int first = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
    auto& row_of = shared_.storage.loader.row_of;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32; i < kPasses * kWarpRows; i += 32) {
      const int group = i / kWarpRows * kRowsPerPass + first + i % kWarpRows;
      row_of[group] = static_cast<unsigned>(group >= problem.groups ? columns : order[group]) *
                      static_cast<unsigned>(p.column_stride * sizeof(typename C::Element));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      rows_[i] = row_of[i * kRowsPerPass + static_cast<int>(threadIdx.x) / kChunks];
    }
    const std::int64_t head = work.batch * problem.heads_kv + work.head_kv;
    k_ = static_cast<const std::uint16_t*>(p.keys_transposed) + head * (columns + 1) * p.column_stride;
  }

  // k_hat^T of a tile, to a stage that is free. key_of(chunk): the first of 8 keys. What is read past the last key is
  // hidden by the mask, and need not be this row's.
  template <class KeyOf>
  __device__ __forceinline__ void load(int stage, const KeyOf& key_of) {
    const std::uint32_t tile = shared_.keys(stage);
    C::Stages::fusion([&] {
      const std::int64_t key = min(std::int64_t{key_of(static_cast<int>(threadIdx.x) % kChunks)}, last_);
      const std::byte* const keys =
          ptx::opaque(reinterpret_cast<const std::byte*>(k_ + key));  // else it is made anew for every row
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        ptx::cp_async_16(place(tile, i), keys + rows_[i], true);
      }
    });
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    publish(pending_);
    pending_ = shared_.keys_full(stage);
  }
  // Publishes what is still on its way.
  __device__ __forceinline__ void finish() {
    ptx::cp_async_wait<0>();
    publish(pending_);
  }

 private:
  static constexpr int kChunks = C::kKeys / kChunk;  // of a row
  static constexpr int kRowsPerPass = kWarpgroup / kChunks;
  static constexpr int kPasses = C::kColumns / kRowsPerPass;

  // Where this thread's chunk of its i-th row lies.
  [[nodiscard]] __device__ static std::uint32_t place(std::uint32_t tile, int i) {
    constexpr unsigned kPanelChunks = 8;  // of 16 bytes in a row of a panel, swizzled by the row's number
    const unsigned row = threadIdx.x / kChunks;
    const unsigned chunk = threadIdx.x % kChunks;
    const std::uint32_t first = tile + chunk / kPanelChunks * C::KeyTile::kPanelBytes + row * C::KeyTile::kRowBytes +
                                (chunk % kPanelChunks ^ row % kPanelChunks) * 16;
    const auto later = static_cast<unsigned>(i * kRowsPerPass);
    return (first ^ later % kPanelChunks * 16) + later * C::KeyTile::kRowBytes;
  }

  __device__ static void publish(std::uint32_t full) {
    if (full == 0) {
      return;
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::barrier_arrive(full);
    }
  }

  const Shared<C>& shared_;
  const std::uint16_t* k_;     // K^T of the head
  std::int64_t last_;          // where the last 8 keys of a row begin
  std::uint32_t pending_ = 0;  // full barrier of the tile on its way
  unsigned rows_[kPasses];     // where this thread's rows of K^T begin, in bytes
};

}  // namespace distr::cuda::sm90
