// SPDX-License-Identifier: Apache-2.0
// What a thread block of the sm_80 forward kernel works on, and its shared memory.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/near.cuh"
#include "cuda/ptx.cuh"
#include "cuda/sm80/config.h"
#include "cuda/sm80/shared_tile.h"
#include "cuda/tile.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm80 {

// The queries and the keys that a thread block works on.
struct Work {
  int batch, head, head_kv;
  int row;          // the first query
  int first, last;  // tiles of keys: all that any of the queries sees, or one split of them

  template <class C>
  __device__ static Work of(unsigned cta, const ForwardParameters& p, C) {
    const SplitKv::Split split = p.split.at(cta);
    const WorkTile tile = p.scheduler.at(split.tile);
    Work work{C::kSequences ? 0 : tile.batch, tile.head, tile.head_kv, tile.row, 0, 0};
    const std::int64_t row = min(std::int64_t{work.row} + C::kRows, p.row_end) - 1;
    const std::int64_t keys = visible_keys(p.problem, place_of<C>(p, 0, row).query);
    unsigned tiles = (static_cast<unsigned>(keys) + C::kKeys - 1) / C::kKeys;
    int before = 0;  // the left end of a sliding window
    if (C::kMasks && has_left_end(p.problem)) {
      const std::int64_t first_key = first_visible_key(p.problem, work.row);  // behind all keys: no tile is seen
      before = first_key < keys ? static_cast<int>(first_key) / C::kKeys : static_cast<int>(tiles);
      tiles -= static_cast<unsigned>(before);
    }
    work.first = before + static_cast<int>(tiles * split.index / split.count);
    work.last = before + static_cast<int>(tiles * (split.index + 1) / split.count);
    return work;
  }
};

// Values of CtaState::online_end. The row max is online in all tiles, whose scores are scaled before they are used:
// from kAllTiles on. And these are rows that are computed again, with kHeadroom: kRepeated.
inline constexpr int kAllTiles = INT_MAX - 1;
inline constexpr int kRepeated = INT_MAX;

// In a repeated pass V is so much smaller, and O with it: sums of values whose mean is finite may leave fp32's range. A
// power of two, so nothing is rounded otherwise. P is 2^8 at most, so that does for 2^24 keys. Values of fp16 are small
// enough as they are.
template <class C>
inline constexpr float kHeadroom = std::is_same_v<typename C::Element, __nv_bfloat16> ? 0x1p32F : 1.0F;

// State that is needed once a tile or less. It lies in shared memory where registers are scarce, else in registers.
template <class C>
struct CtaState {
  Work work;
  int unmasked;                        // tiles before the first one with a mask
  int online_end;                      // the row max is online in the tiles before it, then fixed; or see above
  const std::uint16_t *keys, *values;  // K (or k_hat) and V of the head
  std::uint8_t rows[C::kStateInShared ? C::kThreads / 4 : 1];  // for each quad, the rows that are not written yet

  // Whether the tile has no mask and the row max is fixed. Both bounds are read in any case, which saves a branch.
  [[nodiscard]] __device__ bool is_plain(int tile) const {
    const int end = unmasked;
    const int begin = online_end;
    return begin <= tile && tile < end;
  }
  [[nodiscard]] __device__ unsigned unwritten() const {
    return rows[C::kStateInShared ? ptx::opaque(threadIdx.x) / 4 : 0];
  }
  __device__ void set_unwritten(unsigned left) {
    if (!C::kStateInShared || ptx::opaque(threadIdx.x) % 4 == 0) {
      rows[C::kStateInShared ? ptx::opaque(threadIdx.x) / 4 : 0] = static_cast<std::uint8_t>(left);
    }
  }
};

// Where the rows of K^T begin that a thread copies chunks of, in bytes from the beginning of K^T.
template <class C>
struct alignas(C::kThreadChunks % 4 == 0 ? 16 : C::kThreadChunks * 4) RowOffsets {
  std::uint32_t of[C::kThreadChunks];
};

// In the place of what a kernel has no use for: they take no memory.
struct NoRawTile {};
struct NoRowOffsets {};
struct NoState {};
struct NoOwnParameters {};

// A thread block's shared memory.
template <class C>
struct SharedStorage {
  using KeyTile = std::conditional_t<C::kExact, SharedTile<C::kKeys, C::kDim>,
                                     SharedTile<std::max(C::kGroups, C::kRowsPerPass), C::kKeys>>;
  using ValueTile = SharedTile<C::kKeys, C::kDim>;
  struct RawTile {  // rows of K^T before they are summed
    alignas(16) std::uint8_t bytes[C::kThreadChunks][C::kThreads][16];
  };
  struct StageTiles {
    KeyTile keys[C::kStages];  // K, or k_hat^T
    ValueTile values[C::kStages];
    [[no_unique_address]] std::conditional_t<C::kMembers == 1, NoRawTile, RawTile> raw;
  };
  struct AllRowOffsets {
    RowOffsets<C> of[C::kRowsPerPass];
  };

  SharedTile<C::kRows, C::kGroups> queries;  // Q or q_hat, which a second pass reads too
  union {
    StageTiles stages;
    SharedTile<C::kRows, C::kDim> query_copy;  // of Q, from which q_hat is made
  };
  [[no_unique_address]] std::conditional_t<C::kExact, NoRowOffsets, AllRowOffsets> row_offsets;
  [[no_unique_address]] std::conditional_t<C::kStateInShared, CtaState<C>, NoState> state;
  [[no_unique_address]] std::conditional_t<C::kSequences, OwnParameters<ForwardParameters>, NoOwnParameters> own;
};

// The address of the stages, which begin with the tiles of keys. All addresses are counted from that of the storage:
// for each that is found by itself the compiler keeps one more register.
template <class C>
[[nodiscard]] __device__ inline std::uint32_t stages_address(const SharedStorage<C>& storage) {
  constexpr std::uint32_t kStages = offsetof(SharedStorage<C>, stages);
  return ptx::shared_address(&storage) + kStages;
}

// V of tile j in the storage at `base`.
template <class C>
[[nodiscard]] __device__ inline Tile<C::kDim> value_tile(std::uint32_t base, int j) {
  using Storage = SharedStorage<C>;
  constexpr std::uint32_t kFirst = offsetof(Storage, stages) + offsetof(typename Storage::StageTiles, values);
  constexpr std::uint32_t kTileBytes = sizeof(typename Storage::ValueTile);
  return {base + kFirst + static_cast<std::uint32_t>(j) % C::kStages * kTileBytes};
}

// Gives a tile of V its headroom, for all threads.
template <class C>
__device__ inline void make_headroom(SharedTile<C::kKeys, C::kDim>& values) {
  if constexpr (kHeadroom<C> != 1) {
    const auto scaled = [](unsigned pair) {
      return bits<unsigned>(__hmul2(bits<__nv_bfloat162>(pair), __float2bfloat162_rn(1 / kHeadroom<C>)));
    };
    auto* const chunks = reinterpret_cast<uint4*>(values.bytes) + ptx::opaque(threadIdx.x);
#pragma unroll  // beside a loop the loop over tiles would lose its uniform registers
    for (int n = 0; n < C::kKeys * C::kDim / kChunk; n += C::kThreads) {
      const uint4 of = chunks[n];
      chunks[n] = {scaled(of.x), scaled(of.y), scaled(of.z), scaled(of.w)};
    }
    __syncthreads();
  }
}

// Whether a thread block's storage is one that every GPU since sm_80 has, and as many fit on an A100's SM as should.
// The latter is not asked of d above 128 and of exact attention at d = 128, most of whose tiles are too large for that.
template <class C>
constexpr bool fits() {
  constexpr std::size_t kSmBytes = std::size_t{164} * 1024;
  constexpr std::size_t kReservedBytes = 1024;  // by the system, for every thread block
  return sizeof(SharedStorage<C>) <= kMaxSharedBytes &&
         (C::kCtasPerSm * (sizeof(SharedStorage<C>) + kReservedBytes) <= kSmBytes || C::kDim > 128 ||
          (C::kExact && C::kDim == 128));
}

}  // namespace distr::cuda::sm80
