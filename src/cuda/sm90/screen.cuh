// SPDX-License-Identifier: Apache-2.0
// Which far halves of tiles 64 queries keep (method, 8), before any of them is attended to.
//
//   for the tiles j of 128 far keys:
//     D_j = q_hat k_hat_j^T - (L + ln p)                 on the tensor cores (Thresholds)
//     keep 64 keys where one of D_j is not negative      with L the log-sum-exp of the row's near scores
//
//   One producer warpgroup gathers k_hat^T from K^T. Of four consumers two share 64 queries and take the tiles by
//   turns. Signs are joined three at a time, where a maximum takes two numbers. A warp's 16 rows decide by themselves,
//   32 halves in a word of bits, which all warps of the 64 rows write together.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/dependent_launch.cuh"
#include "cuda/near.cuh"
#include "cuda/sm90/gather_keys.cuh"
#include "cuda/sm90/key_list.cuh"
#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/screen_config.h"
#include "cuda/sm90/softmax.cuh"

namespace distr::cuda::sm90 {

template <class C>
class ScreenShared : public KeyRing<C, ScreenStorage<C>> {
 public:
  using KeyRing<C, ScreenStorage<C>>::KeyRing;

  [[nodiscard]] __device__ std::uint32_t ones() const { return this->tile(offsetof(ScreenStorage<C>, ones), 0, 0); }
};

// The far tiles of a block's queries, in ascending order.
struct FarTiles {
  NearTiles tiles;

  [[nodiscard]] __device__ int count() const { return tiles.far_count(); }
};

template <class C>
__device__ __forceinline__ void produce_for_screen(const ScreenParameters& p, const WorkTile& work, const FarTiles& far,
                                                   const ScreenShared<C>& shared) {
  if (is_first_warp() && ptx::elect_one_sync()) {
    ptx::barrier_arrive_expect_tx(shared.queries_full(), C::kGroups * C::QueryTile::kBytes);
    for (int group = 0; group < C::kGroups; ++group) {
      tma_load_tile<typename C::QueryTile>(shared.queries(group), p.q, shared.queries_full(), work.row + 64 * group,
                                           work.head, work.batch);
    }
  }
  __syncwarp();
  Gatherer<C, C::kLag, ScreenShared<C>> gatherer(p, work, shared, p.columns);
#pragma unroll 1
  for (int n = 0; n < far.count(); ++n) {
    const PipelineState<C::kStages> state(n);
    wait_empty(shared.keys_empty(state.stage), state.phase);
    const int first = far.tiles.far(n) * C::kKeys;
    gatherer.load(state.stage, [&](int chunk) { return first + chunk * kChunk; });
  }
  gatherer.finish();
}

// The thresholds of 64 rows as a left operand of wgmma, a step of 16 columns: each in three pieces, whose sum has all
// bits of fp32's. Times rows of a constant they begin the sums of a tile; to set them would take as long as the votes.
template <class T>
class Thresholds {
 public:
  // Row i of the right operand, which has 16.
  [[nodiscard]] __device__ static T constant(int i) { return static_cast<T>(i < kPieces ? unit(i) : 0.0F); }

  // Of a thread's two rows.
  __device__ __forceinline__ explicit Thresholds(const float (&threshold)[2]) {
    const int quarter = static_cast<int>(threadIdx.x) % 4;  // of a row: its columns 2 quarter and the next
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float left = -threshold[half];
      float piece[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        piece[i] = static_cast<float>(static_cast<T>(left / unit(i)));
        left = isinf(left) ? 0.0F : left - piece[i] * unit(i);
      }
      const std::uint32_t first = ptx::pack(piece[0], piece[1], T{});
      const std::uint32_t second = ptx::pack(piece[2], 0.0F, T{});
      rows_[half] = quarter == 0 ? first : quarter == 1 ? second : 0;
      rows_[half + 2] = 0;  // of the columns from 8 on
    }
  }
  __device__ __forceinline__ void begin(float (&sum)[64], std::uint64_t ones) const {
    ptx::wgmma<ptx::Major::mn>(sum, rows_, ones, false, T{});
  }

 private:
  static constexpr int kPieces = 3;
  // Of a piece: fp16's have others than 1, so that they hold thresholds to 2^31; above, all is kept.
  [[nodiscard]] __device__ static constexpr float unit(int piece) {
    return !std::is_same_v<T, __half> ? 1.0F : piece == 0 ? 0x1p15F : piece == 1 ? 0x1p4F : 0x1p-7F;
  }

  std::uint32_t rows_[4];
};

// A consumer's part of 64 queries.
template <class C>
class Screener {
 public:
  // row: the thread's first. first_tile: 0 or 1, of which every second one is this consumer's.
  __device__ __forceinline__ Screener(const ScreenParameters& p, const WorkTile& work, const FarTiles& far,
                                      const ScreenShared<C>& shared, int group, int first_tile, int row)
      : p_(p),
        far_(far),
        shared_(shared),
        group_(group),
        first_tile_(first_tile),
        row_(row),
        first_whole_(tiles_before(first_visible_key(p.problem, work.row + C::kRows - 1))),
        whole_end_(static_cast<int>(visible_keys(p.problem, work.row) / C::kKeys)) {
    const std::int64_t head = std::int64_t{work.batch} * p.problem.heads_q + work.head;
    first_ = head * p.problem.seq_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      behind_[half] = std::int64_t{row} + half * 8 < p.row_end ? 0 : 1U << 31;
    }
    kept_ = p.kept + skip_group(p.problem, work, group) * p.kept_words;
  }

  __device__ __forceinline__ void screen() {
    ptx::barrier_wait(shared_.queries_full(), 0);
    const Queries queries(shared_.queries(group_), 0);
    const Thresholds<typename C::Element> thresholds({threshold(row_), threshold(row_ + 8)});
#pragma unroll 1
    for (int n = first_tile_; n < far_.count(); n += C::kConsumersOfGroup) {
      const int tile = far_.tiles.far(n);
      if (tile / kTilesOfWord != word_) {
        flush();
        word_ = tile / kTilesOfWord;
      }
      float above[C::kKeys / 2];
      multiply(queries, thresholds, n, above);
      if (tile < first_whole_ || tile >= whole_end_) {
        apply_mask<C::kKeys>(above, 0, p_.problem, row_, tile * C::kKeys);
      }
      const std::uint32_t kept = keeps(above, 0) | keeps(above, 1) << 1;
      bits_ |= kept << tile % kTilesOfWord * 2;
    }
    flush();
  }

 private:
  static constexpr int kTilesOfWord = 16;

  [[nodiscard]] __device__ static int tiles_before(std::int64_t key) {
    return static_cast<int>((key + C::kKeys - 1) / C::kKeys);
  }
  using Queries = std::conditional_t<C::kQueriesInShared, SharedOperandRows<typename C::QueryTile>,
                                     RegisterOperand<typename C::QueryTile>>;

  // Of a row, of a far score that keeps its half: L + ln p, in units of the scores, less what they have of dropped
  // columns.
  [[nodiscard]] __device__ float threshold(std::int64_t row) const {
    if (row >= p_.row_end) {
      return INFINITY;
    }
    const std::int64_t at = first_ + row;
    const float2 near = p_.near[at];
    if (near.y == 0.0F) {
      return -INFINITY;  // without near keys all are kept that the row sees
    }
    const float dropped = p_.dropped == nullptr ? 0.0F : p_.dropped[at];
    return near.x - dropped + (log2f(near.y) + p_.problem.near.skip_log2) / p_.problem.scale_log2;
  }

  // The n-th tile's scores less their rows' thresholds.
  __device__ __forceinline__ void multiply(const Queries& queries, const Thresholds<typename C::Element>& thresholds,
                                           int n, float (&above)[C::kKeys / 2]) const {
    using T = typename C::Element;
    const PipelineState<C::kStages> state(n);
    ptx::barrier_wait(shared_.keys_full(state.stage), state.phase);
    const SharedOperand<typename C::KeyTile> keys(shared_.keys(state.stage));
    const SharedOperand<typename C::OnesTile> ones(shared_.ones());
    ptx::wgmma_fence();
    thresholds.begin(above, ones.mn_major(0, 0));
#pragma unroll
    for (int step = 0; step < C::kColumns / 16; ++step) {
      queries.template multiply<T, ptx::Major::mn>(above, step, keys.mn_major(step * 16, 0), 0, true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(above);
    arrive_warp(shared_.keys_empty(state.stage));
  }

  // Whether one of the warp's 16 rows keeps a half of a tile, 0 or 1. NaN, which wgmma makes without a sign, keeps.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t keeps(const float (&above)[C::kKeys / 2], int half) const {
    std::uint32_t sign_of_all[2] = {~0U, ~0U};  // two, so that they do not wait for each other
#pragma unroll
    for (int i = 0; i < kHalfKeys / 2; ++i) {
      sign_of_all[i / 2 % 2] &= __float_as_uint(above[half * kHalfKeys / 2 + i]);
    }
    const bool all_below = static_cast<std::int32_t>((sign_of_all[0] | behind_[0]) & (sign_of_all[1] | behind_[1])) < 0;
    return __any_sync(~0U, static_cast<int>(!all_below)) != 0 ? 1 : 0;
  }

  // The bits of a word to global memory.
  __device__ __forceinline__ void flush() {
    if (threadIdx.x % 32 == 0 && bits_ != 0) {
      atomicOr(kept_ + word_, bits_);
    }
    bits_ = 0;
  }

  const ScreenParameters& p_;
  const FarTiles& far_;
  const ScreenShared<C>& shared_;
  const int group_, first_tile_, row_;
  const int first_whole_, whole_end_;  // tiles between that all rows of the block see whole
  std::uint32_t behind_[2];  // a sign for those of the thread's rows that lie behind the last: they keep nothing
  std::uint32_t* kept_;
  std::int64_t first_;  // row of the head, of all heads
  std::uint32_t bits_ = 0;
  int word_ = 0;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) screen(const __grid_constant__ ScreenParameters p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const ScreenShared<C> shared(*reinterpret_cast<ScreenStorage<C>*>(memory));
  static_assert(fits<ScreenStorage<C>>(1));

  const WorkTile work = p.scheduler.at(blockIdx.x);
  const std::int64_t keys = seen_keys(p.problem, work, C::kRows, p.row_end);
  const FarTiles far{near_tiles(p.problem, work.row, keys)};
  if (threadIdx.x == 0) {
    ptx::barrier_init(shared.queries_full(), 1);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::barrier_init(shared.keys_full(stage), GatherKeys::kArrivals);
      ptx::barrier_init(shared.keys_empty(stage), 4 * C::kGroups);  // a warp each of those that take the tile
    }
    ptx::barrier_fence();
  }
  auto& ones = shared.storage.ones;
  for (int i = static_cast<int>(threadIdx.x); i < C::OnesTile::kBytes / 2; i += C::kThreads) {
    reinterpret_cast<typename C::Element*>(&ones)[i] =
        Thresholds<typename C::Element>::constant(i / 64 % 16);  // a row of a panel is all the same
  }
  ptx::fence_proxy_async();
  wait_on_dependent_grids();
  launch_dependent_grids();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<C::kRegisters.producer>();
    produce_for_screen<C>(p, work, far, shared);
  } else {
    ptx::setmaxnreg_inc<C::kRegisters.consumer>();
    const int consumer = uniform(static_cast<int>(threadIdx.x) / kWarpgroup) - 1;
    const int group = consumer % C::kGroups;
    const int row = work.row + group * 64 + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
                    static_cast<int>(threadIdx.x) % 32 / 4;
    Screener<C>(p, work, far, shared, group, consumer / C::kGroups, row).screen();
  }
}

}  // namespace distr::cuda::sm90
