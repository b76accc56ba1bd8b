// SPDX-License-Identifier: Apache-2.0
// The compiled shapes of the kernel in screen.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "cuda/sm90/config.h"
#include "cuda/stages.cuh"

namespace distr::cuda::sm90 {

// kColumns: of q_hat and k_hat, padded. Two consumers share 64 queries, so that the votes of one run beside the
// products of the others.
template <class T, int kColumns_>
struct ScreenConfig {
  using Element = T;
  using Stages = cuda::Stages;
  static constexpr int kColumns = kColumns_;
  static constexpr int kGroups = 2;            // of 64 queries
  static constexpr int kConsumersOfGroup = 2;  // which take the tiles by turns
  static constexpr int kConsumers = kGroups * kConsumersOfGroup;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kKeys = 128;
  static constexpr bool kQueriesInShared = kColumns > 64;
  static constexpr int kStages = kColumns <= 64 ? 8 : 5;
  static constexpr int kLag = kStages - 2;  // tiles on their way behind the one that is published
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr Registers kRegisters{32, 112};
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <=
                registers_at_entry(kThreads) * (1 + kConsumers));

  using QueryTile = Panels<64, kColumns>;   // of a group
  using KeyTile = Panels<kColumns, kKeys>;  // k_hat^T
  using OnesTile = Panels<16, kKeys>;       // see Thresholds
};

template <class C>
struct ScreenStorage {
  SharedTile<typename C::QueryTile> queries[C::kGroups];
  SharedTile<typename C::KeyTile> keys[C::kStages];
  SharedTile<typename C::OnesTile> ones;
  struct {
    unsigned row_of[C::kColumns];
  } loader;
  struct Barriers {
    Barrier queries_full;
    Barrier keys_full[C::kStages], keys_empty[C::kStages];
  } barriers;
};

// What the kernel takes by value.
struct ScreenParameters {
  CUtensorMap q;                // q_hat [r, rows, heads, batch], boxes of 64 rows
  const void* keys_transposed;  // K^T as transpose() leaves it
  std::int64_t column_stride;
  const std::int32_t* order;  // [B, Hq, blocks, d], or null: all columns as they are
  int columns;                // that are kept
  DeviceProblem problem;
  const float* dropped;  // [B, Hq, Nq], or null: 0
  const float2* near;    // [B, Hq, Nq]: row max and row sum of near keys
  std::uint32_t* kept;   // [B, Hq, ceil(Nq / 64), kept_words], zeros before
  std::int64_t kept_words;
  TileScheduler scheduler;
  std::int64_t row_end;
};

struct ScreenVariant {
  DType dtype;
  int columns;
  int shared_bytes;
  void (*launch)(const ScreenParameters& parameters, void* stream);
};

[[nodiscard]] std::span<const ScreenVariant> screen_variants();

}  // namespace distr::cuda::sm90
