// SPDX-License-Identifier: Apache-2.0
// The compiled shapes of the sm_80 forward kernel. Everything that sizes registers is here; storage.cuh has the shared
// memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/problem.h"
#include "cuda/sequence.cuh"
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

enum class RowsOf : std::uint8_t { head, kv_head };

// kDim: d and dv, padded. kGroups: r, padded; kDim for exact attention. kRows: queries of a thread block. kMembers:
// rows of K^T that make a group: 1 where they are taken as they are (exact, energy, fused beforehand). Stages_:
// cuda/stages.cuh. kRowsOf: whose queries a tile has; of a KV head those of all its query heads, query after query, and
// then lengths may be data.
template <class T, int kDim_, int kGroups_, int kRows_, int kMembers_, class Stages_ = cuda::Stages,
          RowsOf kRowsOf = RowsOf::head>
struct Config {
  using Element = T;
  using Stages = Stages_;
  static constexpr int kDim = kDim_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRows = kRows_;
  static constexpr int kMembers = kMembers_;
  static constexpr bool kSequences = kRowsOf == RowsOf::kv_head;
  // Serves what changes_scores() and a sliding window's left end, for which others have no registers left.
  static constexpr bool kMasks = kRows == 64 && !kSequences;
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
  static constexpr int kCtasPerSm = kDim > 64 ? 2 : kRows == 64 && !kSequences ? 4 : 3;
  static constexpr bool kPrefetchesState = kCtasPerSm == 2;  // all that a tile needs of shared memory (forward.cuh)

  // Rows of a tile of k_hat^T that all threads copy at once, a chunk of 16 bytes each; and the chunks of K^T that a
  // thread copies for a tile.
  static constexpr int kRowsPerPass = kThreads * 8 / kKeys;
  static constexpr int kThreadChunks = (kGroups + kRowsPerPass - 1) / kRowsPerPass * kMembers;

  // What there are no registers for lies in shared memory: CtaState (storage.cuh).
  static constexpr bool kStateInShared = kRowTiles > 1 || kMembers > 1 || kSequences;
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
  // kSequences, whose rows are queries times the query heads of a KV head.
  Divisor heads_of_row;
  DeviceLengths lengths;
  std::int64_t lse_stride;  // of a head
  // Where q_hat has the scale in it S is in logarithms to the base 2, `scale_log2` is 1, and there is no row max.
  bool scale_in_queries;
  float query_scale;  // a factor of q_hat
};

// Where a row of a tile lies.
struct RowPlace {
  int head;
  std::int64_t query;
};

// `head`: the tile's, which of kSequences is a KV head.
template <class C>
[[nodiscard]] __device__ inline RowPlace place_of(const ForwardParameters& p, int head, std::int64_t row) {
  if constexpr (C::kSequences) {
    const auto index = static_cast<unsigned>(row);
    return {head * static_cast<int>(p.heads_of_row.value()) + static_cast<int>(index % p.heads_of_row),
            static_cast<std::int64_t>(index / p.heads_of_row)};
  } else {
    return {head, row};
  }
}

template <class C>
[[nodiscard]] __device__ inline int query_of(const ForwardParameters& p, int row) {
  return static_cast<int>(place_of<C>(p, 0, row).query);
}

// Where LSE of a row lies.
template <class C>
[[nodiscard]] __device__ inline std::int64_t lse_index(const ForwardParameters& p, int batch, const RowPlace& row) {
  return C::kSequences ? row.head * p.lse_stride + row.query
                       : (batch * p.problem.heads_q + row.head) * p.problem.seq_q + row.query;
}

}  // namespace distr::cuda::sm80
