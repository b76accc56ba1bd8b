// SPDX-License-Identifier: Apache-2.0
// Tiles of k_hat in a block's own grouping, fused from K as they are needed (paper, Section 3.3: the fusion on chip):
//
//   k_hat = K M, where M[c, g] is 1 if group g has column c, else 0
//
//   a product of the tensor cores, whose sums are fp32 and rounded once. The first warpgroup makes it in halves of a
//   tile: while one half is rounded and stored the product of the other is under way. The last warpgroup issues TMA:
//   one thread loads q_hat and K, one of another warp V. The TMA unit takes in 16 KB in some 350 clocks and a thread
//   waits for that, so those of a tile take about the time of a tile (docs/kernel-log.md, sm90/forward, step 59).
#pragma once

#include <cstdint>

#include "cuda/ptx.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tma_keys.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

template <class C>
class Fuser;

struct FuseKeys {
  static constexpr KeyLoad kLoad = KeyLoad::fuse;
  static constexpr int kProducers = 2;
  static constexpr int stages(int /*values*/) { return 3; }
  static constexpr unsigned kArrivals = kWarpgroup / 32;  // that make a tile full: of the warps that fuse it
  static constexpr unsigned kValueArrivals = 1;           // of V
  static constexpr bool kTransposed = false;
  static constexpr Registers registers(int /*consumers*/) { return {72, 208, 24}; }

  template <int kColumns, int kKeys>
  using KeyTile = Panels<kKeys, kColumns>;
  template <class C>
  using SourceTile = Panels<C::kKeys, C::kValues>;  // of K, as it is
  template <class C>
  using GroupTile = Panels<C::kColumns, C::kValues>;  // M^T
  template <class C>
  using LoadsOfConsumer = NoLoads;

  static constexpr int kSourceStages = 2;
  template <class C>
  struct Storage {
    SharedTile<SourceTile<C>> source[kSourceStages];
    SharedTile<GroupTile<C>> groups;
    int group_of[C::kValues];  // of a column
  };
  struct Barriers {
    Barrier source_full[kSourceStages], source_empty[kSourceStages];
  };
  template <class C>
  [[nodiscard]] __device__ static std::uint32_t source(const Shared<C>& shared, int stage) {
    return shared.loader_tile(offsetof(Storage<C>, source), SourceTile<C>::kBytes, stage);
  }
  template <class C>
  [[nodiscard]] __device__ static std::uint32_t groups(const Shared<C>& shared) {
    return shared.loader_tile(offsetof(Storage<C>, groups), GroupTile<C>::kBytes, 0);
  }
  template <class C>
  [[nodiscard]] __device__ static std::uint32_t source_full(const Shared<C>& shared, int stage) {
    return shared.loader_barrier(offsetof(Barriers, source_full), stage);
  }
  template <class C>
  [[nodiscard]] __device__ static std::uint32_t source_empty(const Shared<C>& shared, int stage) {
    return shared.loader_barrier(offsetof(Barriers, source_empty), stage);
  }

  template <class C>
  __device__ static void init_barriers(const Shared<C>& shared) {
    for (int stage = 0; stage < kSourceStages; ++stage) {
      ptx::barrier_init(source_full(shared, stage), 1);
      ptx::barrier_init(source_empty(shared, stage), kWarpgroup / 32);
    }
  }

  // What the first warpgroup does in a pass: k_hat = K M.
  template <class C>
  __device__ static void produce(const Pass<C>& pass) {
    Fuser<C> fuser(pass);
#pragma unroll 1
    for (int n = 0; n < pass.tiles; ++n) {
      fuser.make(n);
    }
    ptx::wgmma_wait<0>();
  }

  // What the last warpgroup does in a pass: TMA.
  template <class C>
  __device__ static void produce_second(const Pass<C>& pass) {
    const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) % kWarpgroup / 32, 0);
    if (warp == 0 && ptx::elect_one_sync()) {
      if (pass.used == 0) {
        load_queries(pass);
      }
#pragma unroll 1
      for (int n = 0; n < pass.tiles; ++n) {
        load_source(pass, n);
      }
      if (pass.used == 0) {
        prefetch_next<C>(pass.p);
      }
    }
    if (warp == 1 && ptx::elect_one_sync()) {
#pragma unroll 1
      for (int n = 0; n < pass.tiles; ++n) {
        load_values(pass, n);
      }
    }
  }

  template <class C>
  __device__ static void prefetch(const ForwardParameters& p, const WorkTile& next) {
    tma_prefetch_tile<SourceTile<C>>(p.k, next.row, next.head_kv, next.batch);
  }

 private:
  // K of tile n, as soon as a stage is free.
  template <class C>
  __device__ __forceinline__ static void load_source(const Pass<C>& pass, int n) {
    const PipelineState<kSourceStages> state(pass.used + n);
    const std::uint32_t full = source_full(pass.shared, state.stage);
    wait_empty(source_empty(pass.shared, state.stage), state.phase);
    ptx::barrier_arrive_expect_tx(full, SourceTile<C>::kBytes);
    tma_load_tile<SourceTile<C>>(source(pass.shared, state.stage), pass.p.k, full, pass.first_key(n), pass.work.head_kv,
                                 pass.work.batch);
  }
};

template <class C>
class Fuser {
 public:
  // The first tile's products are started.
  __device__ __forceinline__ explicit Fuser(const Pass<C>& pass) : pass_(pass) {
    write_groups();
    const Source source(pass.used);
    ptx::barrier_wait(FuseKeys::source_full(pass_.shared, source.stage), source.phase);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      upper_[i] = lower_[i] = 0;
    }
    start(upper_, kUpper, source);
    start(lower_, kLower, source);
  }

  // Tile n. The next one's products are started, or after the last tile its own once more, for nothing: a branch around
  // them would make each wait for the one before.
  __device__ __forceinline__ void make(int n) {
    const auto state = pass_.state(n);
    const int use = pass_.used + n;
    const Source source(use);
    const Source next(n + 1 == pass_.tiles ? use : use + 1);
    const std::uint32_t tile = pass_.shared.keys(state.stage);
    wait_empty(pass_.shared.keys_empty(state.stage), state.phase);
    ptx::wgmma_wait<1>();
    store(upper_, kUpper, tile);
    ptx::barrier_wait(FuseKeys::source_full(pass_.shared, next.stage), next.phase);
    start(upper_, kUpper, next);
    ptx::wgmma_wait<1>();
    arrive_warp(FuseKeys::source_empty(pass_.shared, source.stage));
    store(lower_, kLower, tile);
    start(lower_, kLower, next);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive_warp(pass_.shared.keys_full(state.stage));
  }

 private:
  using T = typename C::Element;
  using Source = PipelineState<FuseKeys::kSourceStages>;
  using SourceTile = FuseKeys::SourceTile<C>;
  using GroupTile = FuseKeys::GroupTile<C>;
  static constexpr int kSums = C::kColumns / 2;        // of a thread, for 64 keys
  static constexpr int kUpper = C::kHalf, kLower = 0;  // first keys of a half
  static_assert(C::kHalf == 64 && C::kValues == kWarpgroup);

  // M^T [groups][columns].
  __device__ void write_groups() const {
    constexpr int kNone = -1;
    const ForwardParameters& p = pass_.p;
    const WorkTile& work = pass_.work;
    const DeviceProblem& problem = p.problem;
    const std::int64_t head = work.batch * problem.heads_q + work.head;
    const std::int32_t* order =
        p.order + (head * problem.blocks + static_cast<unsigned>(work.row) / problem.rows_of_block) * problem.head_dim;
    auto& group_of = pass_.shared.storage.loader.group_of;
    const auto thread = static_cast<int>(threadIdx.x);
    const int group_of_place = thread / problem.members;
    const bool exists = thread < problem.head_dim;
    group_of[exists ? order[thread] : thread] = exists && group_of_place < problem.groups ? group_of_place : kNone;
    ptx::named_barrier_sync(1, kWarpgroup);

    constexpr int kRowChunks = GroupTile::kColumns / 8;  // of 16 bytes
    const int chunk = thread % kRowChunks;
    int groups[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      groups[i] = group_of[chunk * 8 + i];
    }
    const std::uint32_t panel =
        FuseKeys::groups(pass_.shared) + static_cast<std::uint32_t>(chunk / 8 * GroupTile::kPanelBytes);
#pragma unroll 1
    for (int group = thread / kRowChunks; group < GroupTile::kRows; group += kWarpgroup / kRowChunks) {
      const auto pair = [&](int i) {
        return ptx::pack(groups[i] == group ? 1.0F : 0.0F, groups[i + 1] == group ? 1.0F : 0.0F, T{});
      };
      ptx::store_shared_16(
          panel + static_cast<std::uint32_t>(group * GroupTile::kRowBytes + (chunk % 8 ^ group % 8) * 16),
          uint4{pair(0), pair(2), pair(4), pair(6)});
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(1, kWarpgroup);
  }

  // Starts K M for the 64 keys from `first` on.
  __device__ __forceinline__ void start(float (&sums)[kSums], int first, const Source& source) const {
    const SharedOperand<SourceTile> keys(FuseKeys::source(pass_.shared, source.stage));
    const SharedOperand<GroupTile> groups(FuseKeys::groups(pass_.shared));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kValues / 16; ++step) {
      ptx::wgmma<ptx::Major::k, ptx::Major::k>(sums, keys.k_major(first, step), groups.k_major(0, step), step > 0, T{});
    }
    ptx::wgmma_commit();
  }

  // The sums of those keys to k_hat's tile, in the element's type.
  __device__ __forceinline__ void store(const float (&sums)[kSums], int first, std::uint32_t tile) const {
    using P = typename C::KeyTile;
    constexpr unsigned kPanelChunks = P::kRowBytes / 16;
    const unsigned lane = threadIdx.x % 32;
    const unsigned row = static_cast<unsigned>(first) + threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (unsigned step = 0; step < C::kColumns / 16; ++step) {
      std::uint32_t words[4];
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) {
        words[i] = ptx::pack(sums[step * 8 + i * 2], sums[step * 8 + i * 2 + 1], T{});
      }
      const unsigned chunk = step * 2 + lane / 16;
      const unsigned place = chunk % kPanelChunks ^ row * P::kRowBytes / 128 % kPanelChunks;
      ptx::stmatrix_x4(tile + chunk / kPanelChunks * P::kPanelBytes + row * P::kRowBytes + place * 16, words);
    }
  }

  const Pass<C>& pass_;
  float upper_[kSums], lower_[kSums];
};

}  // namespace distr::cuda::sm90
