// SPDX-License-Identifier: Apache-2.0
// The compiled shapes of the sm_80 forward kernel. Everything that sizes registers or shared memory is here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/problem.h"
#include "cuda/sm80/split_kv.h"
#include "cuda/stages.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm80 {

template <class C>
class ExactKeys;
template <class C>
class GroupedKeys;
template <class C>
class ExactQueries;
template <class C>
class GroupedQueries;

// kDim: d and dv, padded. kGroups: r, padded; kDim for exact attention. kRows: queries of a thread block. kMembers:
// rows of K^T that make a group: 1 where they are taken as they are (exact, energy, fused beforehand). Stages_:
// cuda/stages.cuh.
template <class T, int kDim_, int kGroups_, int kRows_, int kMembers_, class Stages_ = cuda::Stages>
struct Config {
  using Element = T;
  using Stages = Stages_;
  static constexpr int kDim = kDim_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRows = kRows_;
  static constexpr int kMembers = kMembers_;
  static constexpr bool kMasks = kRows == 64;  // serves mask tensors, for which others have no registers left
  static constexpr bool kExact = kGroups == kDim;
  using Keys = std::conditional_t<kExact, ExactKeys<Config>, GroupedKeys<Config>>;
  using Queries = std::conditional_t<kExact, ExactQueries<Config>, GroupedQueries<Config>>;

  static constexpr int kKeys = kDim <= 128 ? 64 : 32;  // keys of a tile
  // Parts of a tile's keys that go through products and softmax one after the other: with two, the exponentials of one
  // run under a product of the other. One where there are no registers for that.
  static constexpr int kParts = kDim == 64 && kRows == 128 && (kExact || kMembers == 2) ? 1 : 2;
  static constexpr int kPartKeys = kKeys / kParts;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kRows / kWarps / 16;  // m16 tiles of a warp
  static constexpr int kStages = 2;
  static constexpr int kCtasPerSm = kDim > 64 ? 2 : kRows == 64 ? 4 : 3;
  static constexpr bool kPrefetchesState = kCtasPerSm == 2;  // all that a tile needs of shared memory (forward.cuh)

  // Of k_hat^T: rows of a tile that all threads take at once, 16 bytes each, and rows of K^T that a thread reads for
  // it.
  static constexpr int kRowsPerPass = kThreads * 8 / kKeys;
  static constexpr int kSlots = (kGroups + kRowsPerPass - 1) / kRowsPerPass * kMembers;

  static constexpr int kKeyBytes = std::max(kKeys * kGroups, kExact ? 0 : kRowsPerPass* kKeys) * 2;  // a stage
  static constexpr int kValueBytes = kKeys * kDim * 2;                                               // a stage
  static constexpr int kQueryBytes = kRows * kGroups * 2;
  static constexpr int kStageBytes = kStages * (kKeyBytes + kValueBytes);
  static constexpr int kRawBytes = kMembers == 1 ? 0 : kSlots * kThreads * 16;  // rows of K^T before they are summed
  static constexpr int kTableBytes = kExact ? 0 : kRowsPerPass * kSlots * 4;    // where its rows begin
  // What there are no registers for lies in shared memory: CtaState (forward.cuh).
  static constexpr bool kStateInShared = kRowTiles > 1 || kMembers > 1;
  static constexpr int kStateBytes = kStateInShared ? kThreads / 4 + 48 : 0;
  // Q or q_hat, and the stages; q_hat is built from a copy of Q where the stages will be.
  static constexpr int kCopyBytes = kExact ? 0 : kRows * kDim * 2;
  static constexpr int kSharedBytes =
      kTableBytes + kStateBytes + kQueryBytes + std::max(kStageBytes + kRawBytes, kCopyBytes);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  // So many fit on an A100's SM; not asked of d above 128 and of exact attention at d = 128, most of whose tiles are
  // too large for that.
  static_assert(kCtasPerSm * (kSharedBytes + 1024) <= 164 * 1024 || kDim > 128 || (kExact && kDim == 128));
};

// S of a part of a tile, in the layout of the mma's accumulators.
template <class C>
struct ScoreFragment {
  float of[C::kRowTiles][C::kPartKeys / 8][4];
};

// What the kernel takes by value. Tensors are aligned to 16 bytes, and so are their strides (prepare/operand.h).
struct ForwardParameters {
  DeviceProblem problem;      // with the strides of the tensors below
  const void* q;              // [B, Hq, Nq, d]
  const void* k;              // exact: [B, Hkv, Nk, d]. Grouped: columns of K as rows, see below
  const void* v;              // [B, Hkv, Nk, dv]
  void* o;                    // [B, Hq, Nq, dv], any strides
  float* lse;                 // [B, Hq, Nq] or null
  const std::int32_t* order;  // [B, Hq, blocks, d]
  // Grouped: K^T [B, Hkv, d + 1, column_stride], or fused beforehand [B, Hq, r + 1, column_stride]; the last row is 0.
  std::int64_t column_stride;
  bool fused;               // k holds k_hat^T
  TileScheduler scheduler;  // of the queries of this launch
  std::int64_t row_end;     // behind the last of them
  SplitKv split;
};

}  // namespace distr::cuda::sm80
