// SPDX-License-Identifier: Apache-2.0
// Tiles of k_hat in a block's own grouping, made from K as they are needed (paper, Section 3.3: the fusion on chip):
//
//   k_hat = K M, where M[c, g] is 1 if group g has column c, else 0
//
//   a product of the tensor cores, whose sums are fp32 and rounded once. The first warpgroup makes it in halves of a
//   tile: while one half is rounded and stored the product of the other is under way. It asks for no copies: the
//   copy engine takes in those of a tile in about the time of a tile (docs/kernel-log.md, sm90/forward, step 59).
#pragma once

#include <cstdint>

#include "cuda/ptx.cuh"
#include "cuda/rows.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/products.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/ring.cuh"

namespace distr::cuda::sm90 {

template <class C>
class SummedKeys {
 public:
  // The first tile's products are started. `used`: tiles that went through the rings before.
  __device__ SummedKeys(const ForwardParameters& p, const Rows& work, const Shared<C>& shared, int used)
      : shared_(shared) {
    write_groups(p, work);
    const Source source(used);
    ptx::barrier_wait(shared_.source_full(source.stage), source.parity);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      upper_[i] = lower_[i] = 0;
    }
    start(upper_, kUpper, source);
    start(lower_, kLower, source);
  }

  // The tile that went through the rings as number `use`. The next one's products are started, or after the last tile
  // its own once more, for nothing: a branch around them would make each wait for the one before.
  __device__ __forceinline__ void make(int use, bool is_last) {
    const Turn<C> turn(use);
    const Source source(use);
    const Source next(is_last ? use : use + 1);
    const std::uint32_t tile = shared_.keys(turn.stage);
    ptx::barrier_wait(shared_.keys_empty(turn.stage), turn.parity ^ 1);
    ptx::wgmma_wait<1>();
    keep(upper_, kUpper, tile);
    ptx::barrier_wait(shared_.source_full(next.stage), next.parity);
    start(upper_, kUpper, next);
    ptx::wgmma_wait<1>();
    release(shared_.source_empty(source.stage));
    keep(lower_, kLower, tile);
    start(lower_, kLower, next);
    ptx::fence_proxy_async();
    __syncwarp();
    release(shared_.keys_full(turn.stage));
  }

 private:
  using T = typename C::Element;
  using Source = Turn<typename C::Source>;
  static constexpr int kSums = C::kColumns / 2;        // of a thread, for 64 keys
  static constexpr int kUpper = C::kHalf, kLower = 0;  // first keys of a half
  static_assert(C::kHalf == 64 && C::kValues == 128);

  // M^T [groups][columns].
  __device__ void write_groups(const ForwardParameters& p, const Rows& work) const {
    constexpr int kNone = -1;
    const DeviceProblem& problem = p.problem;
    const std::int64_t head = work.batch * problem.heads_q + work.head;
    const std::int32_t* order =
        p.order + (head * problem.blocks + static_cast<unsigned>(work.row) / problem.rows_of_block) * problem.head_dim;
    __shared__ int group_of[C::kValues];  // of a column
    const auto thread = static_cast<int>(threadIdx.x);
    const int group_of_place = thread / problem.members;
    const bool exists = thread < problem.head_dim;
    group_of[exists ? order[thread] : thread] = exists && group_of_place < problem.groups ? group_of_place : kNone;
    ptx::named_barrier_sync(1, C::kWarpgroup);

    using M = typename C::GroupTile;
    constexpr int kPieces = M::kColumns / 8;  // of 16 bytes
    const int piece = thread % kPieces;
    int groups[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      groups[i] = group_of[piece * 8 + i];
    }
    const std::uint32_t panel = shared_.groups() + static_cast<std::uint32_t>(piece / 8 * M::kPanelBytes);
#pragma unroll 1
    for (int group = thread / kPieces; group < M::kRows; group += C::kWarpgroup / kPieces) {
      const auto pair = [&](int i) {
        return ptx::pack(groups[i] == group ? 1.0F : 0.0F, groups[i + 1] == group ? 1.0F : 0.0F, T{});
      };
      ptx::store_shared_16(panel + static_cast<std::uint32_t>(group * M::kRowBytes + (piece % 8 ^ group % 8) * 16),
                           uint4{pair(0), pair(2), pair(4), pair(6)});
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(1, C::kWarpgroup);
  }

  // K M for the 64 keys from `first` on.
  __device__ __forceinline__ void start(float (&sums)[kSums], int first, const Source& source) const {
    const SharedOperand<typename C::SourceTile> keys(shared_.source(source.stage));
    const SharedOperand<typename C::GroupTile> groups(shared_.groups());
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kValues / 16; ++step) {
      ptx::wgmma<ptx::Rows::along_k, ptx::Rows::along_k>(sums, keys.along_k(first, step), groups.along_k(0, step),
                                                         step > 0, T{});
    }
    ptx::wgmma_commit();
  }

  // The sums of those keys to k_hat's tile, in the element's type.
  __device__ __forceinline__ void keep(const float (&sums)[kSums], int first, std::uint32_t tile) const {
    using P = typename C::KeyTile;
    constexpr unsigned kPieces = P::kRowBytes / 16;
    const unsigned lane = threadIdx.x % 32;
    const unsigned row = static_cast<unsigned>(first) + threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (unsigned step = 0; step < C::kColumns / 16; ++step) {
      std::uint32_t words[4];
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) {
        words[i] = ptx::pack(sums[step * 8 + i * 2], sums[step * 8 + i * 2 + 1], T{});
      }
      const unsigned piece = step * 2 + lane / 16;
      const unsigned place = piece % kPieces ^ row * P::kRowBytes / 128 % kPieces;
      ptx::stmatrix_x4(tile + piece / kPieces * P::kPanelBytes + row * P::kRowBytes + place * 16, words);
    }
  }

  const Shared<C>& shared_;
  float upper_[kSums], lower_[kSums];
};

// One pass over the tiles of keys.
template <class C>
__device__ inline void sum_all(const ForwardParameters& p, const Rows& work, const Shared<C>& shared, int tiles,
                               int used) {
  SummedKeys<C> keys(p, work, shared, used);
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    keys.make(used + n, n + 1 == tiles);
  }
  ptx::wgmma_wait<0>();
}

}  // namespace distr::cuda::sm90
