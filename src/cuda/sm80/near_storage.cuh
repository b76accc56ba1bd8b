// SPDX-License-Identifier: Apache-2.0
// What near_forward takes, and its shared memory (near.cuh).
#pragma once

#include <cstdint>

#include "cuda/sm80/config.h"
#include "cuda/sm80/near_keys.cuh"
#include "cuda/sm80/storage.cuh"

namespace distr::cuda::sm80 {

struct NearParameters {
  ForwardParameters forward;  // k holds K^T
  const float* key_means;     // [B, Hkv, means, d], where far scores keep them
  std::int32_t* halves;       // [B, Hq, ceil(Nq / 64), 2], or null
};

// Of 64 rows: the far halves that they kept and saw, and which ones they see.
struct HalfCounts {
  int kept, seen;
  int first, end;
};

// What every thread needs of its block's work, and has no registers for.
struct NearState {
  Work work;
  Positions positions;
  KeySegments segments;
  const std::uint16_t *keys, *values;  // K^T and V of the KV head
  bool repeats;                        // rows for which the first pass did not do
};

// Thread blocks that share an SM.
template <class C>
inline constexpr int kNearCtasPerSm = C::kRowTiles == 1 && C::kDim <= 64 ? 4 : 2;

template <class C>
struct NearStorage {
  struct StageTiles {
    SharedTile<C::kDim, C::kKeys> keys[2];  // K^T
    SharedTile<C::kKeys, C::kDim> values[2];
  };
  SharedTile<C::kRows, C::kDim> queries;
  union {
    StageTiles stages;
    SharedTile<C::kRows, C::kDim> query_copy;
  };
  // At each position p of Q and K^T, [p % 16][p / 16]; d where there is none: K^T has a row of zeros there. Bytes, as
  // two blocks of 64 rows at d = 128 just fit into an SM of 164 KB.
  std::uint8_t columns[16][C::kDim / 16];
  float dropped[C::kRows];  // what means of dropped columns add to far scores, as logarithms to the base 2
  float limits[C::kRows];   // a far half without scores above them is skipped
  HalfCounts counts[C::kRows / common::kSkipRows];
  std::uint8_t rows[C::kThreads];  // a thread's rows that are not written yet, a bit each
  NearState state;
};

// K^T and V of a stage.
template <class C>
[[nodiscard]] __device__ inline Tile<C::kKeys> key_tile(const NearStorage<C>& storage, int stage) {
  using Keys = decltype(storage.stages.keys[0]);
  return {ptx::shared_address(&storage.stages.keys) +
          static_cast<std::uint32_t>(stage) * static_cast<std::uint32_t>(sizeof(Keys))};
}
template <class C>
[[nodiscard]] __device__ inline Tile<C::kDim> value_tile(const NearStorage<C>& storage, int stage) {
  using Values = decltype(storage.stages.values[0]);
  return {ptx::shared_address(&storage.stages.values) +
          static_cast<std::uint32_t>(stage) * static_cast<std::uint32_t>(sizeof(Values))};
}

}  // namespace distr::cuda::sm80
