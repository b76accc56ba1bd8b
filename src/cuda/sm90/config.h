// SPDX-License-Identifier: Apache-2.0
// The compiled shapes of the sm_90a forward kernel. Everything that sizes registers or shared memory is here and in the
// key loaders (tma_keys.cuh, gather_keys.cuh, fuse_keys.cuh).
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/lengths.h"
#include "cuda/problem.h"
#include "cuda/score_cap.h"
#include "cuda/sm90/heuristics.h"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

// A tensor whose batch entries end by themselves has a map of five axes: columns, kEntryRows rows, heads, the row
// behind an entry's end, and an axis whose last place, kEntryRows, is always taken. All but columns and heads step by a
// row, the last one by kEntryWrap less a row, so kEntryRows steps of it and of rows make 2^64, which is nothing. Of an
// entry of n rows, row i is at (kEntryRows - n + i, end): what lies behind the n-th is outside of the map, so it comes
// as zeros.
inline constexpr int kEntryRows = 1 << 30;
inline constexpr std::uint64_t kEntryWrap = std::uint64_t{1} << 34;

// A tile [kRows][kColumns] of 16-bit elements as TMA leaves it: panels of up to 64 columns, each of whole rows, whose
// chunks of 16 bytes are swizzled so that eight rows lie in different banks.
template <int kRows_, int kColumns_, int kPanelColumns_ = std::min(kColumns_, 64)>
struct Panels {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPanelColumns = kPanelColumns_;
  static constexpr int kRowBytes = kPanelColumns * 2;  // 128, 64 or 32, and so is the swizzle's period
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kCount = kColumns / kPanelColumns;
  static constexpr int kBytes = kCount * kPanelBytes;
};

// A tile's place in shared memory. Swizzled tiles begin at a multiple of 1024.
template <class P>
struct alignas(1024) SharedTile {
  std::uint8_t bytes[P::kBytes];
  static_assert(P::kBytes % 1024 == 0);
};

// An mbarrier's place in shared memory.
struct Barrier {
  std::uint64_t state;
};

// Shared memory: the most that a thread block can have, what those of an SM can have together, and what the system
// takes of that for each of them.
inline constexpr std::size_t kMaxCtaBytes = std::size_t{227} * 1024;
inline constexpr std::size_t kSmBytes = std::size_t{228} * 1024;
inline constexpr std::size_t kReservedBytes = 1024;

// Whether so many thread blocks, each of which has a Storage, fit on an SM.
template <class Storage>
constexpr bool fits(int ctas) {
  return sizeof(Storage) <= kMaxCtaBytes &&
         static_cast<std::size_t>(ctas) * (sizeof(Storage) + kReservedBytes) <= kSmBytes;
}

inline constexpr int kWarpgroup = 128;  // threads

// Registers of a thread at the kernel's start, in eights. A block's warpgroups share these between them by setmaxnreg:
// one that asks for more than there are waits for ever.
constexpr int registers_at_entry(int threads) { return 65536 / threads / 8 * 8; }

// Registers of a thread of the first producer warpgroup, of a consumer, and of a second producer.
struct Registers {
  int producer, consumer, second_producer = 0;
};

// Where scores get their factor scale * log2(e): in the softmax, or in q_hat, which was multiplied by it beforehand.
enum class ScaleIn : std::uint8_t { softmax, queries };

// How tiles of k_hat get to shared memory. By TMA: they were made beforehand for the whole sequence, or are K's. Where
// a block of queries has a grouping of its own, a producer warpgroup makes them: it gathers the rows of K^T that are
// k_hat^T, or fuses (sums) columns of K. runs_: of near keys, and then of all far ones (method, 8; near_far.cuh).
// listed_: of some of the keys, in halves of 64 that a list names.
// voted_exact, voted, voted_grouped: near keys and then far ones, of which consumers keep what their rows vote for
// (voted_keys.cuh). Far keys have the queries of near ones; or queries of their own, Q~ or Q once more; or q_hat and
// k_hat, which were made beforehand.
enum class KeyLoad : std::uint8_t {
  tma,
  gather,
  fuse,
  runs_tma,
  runs_gather,
  listed_tma,
  listed_gather,
  voted_exact,
  voted,
  voted_grouped
};

constexpr bool is_listed(KeyLoad load) { return load == KeyLoad::listed_tma || load == KeyLoad::listed_gather; }
constexpr bool is_voted(KeyLoad load) {
  return load == KeyLoad::voted_exact || load == KeyLoad::voted || load == KeyLoad::voted_grouped;
}
constexpr bool is_runs(KeyLoad load) { return load == KeyLoad::runs_tma || load == KeyLoad::runs_gather; }
// Whether near keys have more columns than far ones.
constexpr bool has_near_columns(KeyLoad load) { return is_runs(load) || load == KeyLoad::voted_grouped; }

// Which keys a launch with a list takes (method, 8): those near its queries, or those far of them. The launch of far
// keys takes in what the one of near keys left. KeyRuns are near or far.
enum class KeySet : std::uint8_t { near, far };

// Whether a shape takes sliding windows.
enum class Windows : std::uint8_t { refused, taken };

// Which keys a consumer goes through: all that its launch takes; or, where that is both, those near its queries, and
// then those far of them (near_far.cuh).
enum class Phase : std::uint8_t { all, near, far };

template <class C>
struct SharedStorage;

// kColumns: columns of q_hat and k_hat, padded; kValues: dv, padded. A thread block is kConsumers consumer warpgroups
// of 64 queries each, and the producer warpgroups of its KeyLoader_, which says how many registers and pipeline stages
// there are. kCtasPerSm: thread blocks that share an SM. Stages_: cuda/stages.cuh.
template <class T, int kColumns_, int kValues_, int kConsumers_, ScaleIn kScaleIn_, class KeyLoader_, int kCtasPerSm_,
          class Stages_>
struct Config {
  using Element = T;
  using KeyLoader = KeyLoader_;
  using Stages = Stages_;
  using Storage = SharedStorage<Config>;
  static constexpr Phase kPhase = Phase::all;
  static constexpr int kColumns = kColumns_;
  static constexpr int kValues = kValues_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr ScaleIn kScaleIn = kScaleIn_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr bool kIsListed = is_listed(KeyLoader::kLoad);
  static constexpr bool kIsRuns = is_runs(KeyLoader::kLoad);
  static constexpr bool kVotes = is_voted(KeyLoader::kLoad);
  static constexpr bool kHasFarQueries = kVotes && KeyLoader::kLoad != KeyLoad::voted_exact;  // in their own places
  // Of q and K, where near keys come first: all columns, of which far keys may have a part.
  static constexpr int kNearColumns = KeyLoader::kLoad == KeyLoad::voted_grouped ? kValues : kColumns;
  static constexpr bool kFarIsNarrower = kColumns < kNearColumns;
  // Of a tile.
  static constexpr int kKeys = kValues <= 64 && kConsumers == 2 && kCtasPerSm == 1 ? 256 : 128;
  // Whether it caps scores where it is asked to, as shapes of exact attention do; and whether it takes sliding windows.
  // With tiles of 256 keys there are no registers for the one, and at r = 16, gathered, for neither: the compiler waits
  // after every wgmma (C7512; docs/kernel-log.md, sm90/forward, step 69).
  static constexpr bool kCapsScores = KeyLoader::kLoad == KeyLoad::tma && kScaleIn == ScaleIn::softmax &&
                                      kColumns == kValues && kCtasPerSm == 1 && kKeys == 128;
  // Whether it takes lengths that are data, as shapes of exact attention do. Where two blocks share an SM, who loads
  // also computes, and would do more for each tile.
  static constexpr bool kTakesLengths =
      KeyLoader::kLoad == KeyLoad::tma && kScaleIn == ScaleIn::softmax && kColumns == kValues && kCtasPerSm == 1;
  static constexpr Windows kWindows = kKeys == 128 || kColumns > 16 ? Windows::taken : Windows::refused;
  static constexpr int kHalf = kKeys / 2;
  static constexpr int kScoreBuffers = kCtasPerSm == 1 ? 2 : 1;  // as many as there are registers for, and so is kHalf
  // q_hat stays in shared memory where there are no registers for it.
  static constexpr bool kQueriesInShared = kCtasPerSm > 1 || (kConsumers == 3 && kColumns > 32) ||
                                           (kIsListed && kKeys == 256);
  static constexpr int kStages = KeyLoader::stages(kValues);
  static constexpr int kProducers = KeyLoader::kProducers;        // warpgroups
  static constexpr int kFirstConsumer = std::min(kProducers, 1);  // its warpgroup; a second producer is the last
  static constexpr int kWarpgroups = kProducers + kConsumers;
  static constexpr int kThreads = kWarpgroup * kWarpgroups;
  static constexpr auto kRegisters = KeyLoader::registers(kConsumers);
  static_assert(kProducers > 0 || kCtasPerSm > 1);
  static_assert(kProducers == 0 ||
                kRegisters.producer + kConsumers * kRegisters.consumer + kRegisters.second_producer <=
                    registers_at_entry(kThreads * kCtasPerSm) * kWarpgroups);

  // Whether the first pass takes a row max from the scores (RowMax, softmax.cuh).
  static constexpr bool kFixesRowMax = kScaleIn == ScaleIn::softmax;
  // Whether a thread makes the i-th exponential of a half by a polynomial.
  static constexpr bool by_polynomial(int i) { return is_by_polynomial(kValues, kCtasPerSm, i); }

  using QueryTile = Panels<64, kColumns>;  // of a consumer
  using KeyTile = typename KeyLoader::template KeyTile<kColumns, kKeys>;
  using NearQueryTile = Panels<64, kNearColumns>;
  using NearKeyTile = typename KeyLoader::template KeyTile<kNearColumns, kKeys>;
  using ValueTile = Panels<kKeys, kValues>;
};

// What the batch entry of a thread block has of its own where lengths are data (batch_entry.cuh).
struct BatchEntry {
  int keys, causal_offset, first_offset;  // of rows that count from the tensor's first, and keys from the entry's
  int row, row_end;                       // the block's first, and behind the entry's last; none: row_end is 0
  int q_axis, k_axis, v_axis;             // TMA's last coordinates
};
struct NoEntry {};

// A thread block's shared memory: q_hat, the rings of k_hat and V, what the key loader needs beside them, barriers, and
// what consumers keep.
template <class C>
struct SharedStorage {
  // Of near keys, and then of far ones, which may be narrower.
  SharedTile<typename C::NearQueryTile> queries[C::kConsumers * (C::kHasFarQueries ? 2 : 1)];
  SharedTile<typename C::NearKeyTile> keys[C::kStages];
  SharedTile<typename C::ValueTile> values[C::kStages];
  typename C::KeyLoader::template Storage<C> loader;
  struct Barriers {
    Barrier queries_full;
    Barrier keys_full[C::kStages], keys_empty[C::kStages];
    Barrier values_full[C::kStages], values_empty[C::kStages];
    typename C::KeyLoader::Barriers loader;
  } barriers;
  std::conditional_t<C::kTakesLengths, BatchEntry, NoEntry> entry;
  float2 shifts[C::kConsumers * kWarpgroup / 4];  // FixedShift's or Vote's, of four threads that share two rows
};

// What near keys gave: O of them alone, and the row max and sum of the softmax. dv padded as the kernels pad it.
struct NearResult {
  float* o;       // [B, Hq, Nq, dv]
  float2* stats;  // [B, Hq, Nq]: row max, of scores without the scale, and row sum
};

// The keys of a launch that takes some of them, and what it shares with those of the others.
struct ListedKeys {
  KeySet set;
  std::int32_t* halves;  // [B, Hq, ceil(Nq / 64), 2]: far halves that they keep and see, or null
  const float* dropped;  // [B, Hq, Nq]: q times the means of dropped columns of K, or null: 0
  NearResult near;
  float near_scale_log2;  // of near scores; far ones have the problem's, 1 where q_hat has the scale
};

// Rows from a batch entry of K and V to the next; 0 where they are packed.
struct EntryRows {
  std::int32_t k, v;
};

// What the kernel takes by value.
struct ForwardParameters {
  CUtensorMap q, k, v;  // [columns, rows, heads, batch], boxes of a panel: 64 rows of q, kKeys of k and v; 64 of listed
  const void* keys_transposed;  // K^T as transpose() leaves it, where its rows are gathered; else k is read
  std::int64_t column_stride;   // of K^T
  const std::int32_t* order;    // [B, Hq, blocks, d]
  DeviceProblem problem;        // with the sizes and strides of O
  void* o;                      // [B, Hq, Nq, dv], any strides
  float* lse;                   // [B, Hq, Nq] or null
  bool keys_of_query_head;      // k is [B, Hq, Nk, r], fused for each query head
  TileScheduler scheduler;      // of the queries of this launch
  std::int64_t row_end;         // behind the last of them
  unsigned next_tile;           // tiles on, the one that an SM has next, more or less
  bool is_second;               // of two launches that may run side by side: it waits for the first at its end
  ScoreCap score_cap;           // of kernels that cap scores
  ListedKeys listed;            // where near keys and far ones differ
  DeviceLengths lengths;        // that are data
  EntryRows entry_rows;         // of these
  CUtensorMap far_q, far_k;     // of far keys, where they have others than near ones, whose maps are q and k then
};

}  // namespace distr::cuda::sm90
