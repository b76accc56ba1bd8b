// SPDX-License-Identifier: Apache-2.0
// The compiled shapes of the sm_90a forward kernel. Everything that sizes registers or shared memory is here.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/problem.h"
#include "cuda/rows.cuh"
#include "cuda/without.h"

namespace distr::cuda::sm90 {

// A tile [kRows][kColumns] of 16-bit elements as the copy engine leaves it: panels of up to 64 columns, each of whole
// rows, whose 16-byte pieces are permuted so that eight rows lie in different banks.
template <int kRows_, int kColumns_, int kPanelColumns_ = std::min(kColumns_, 64)>
struct Panels {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPanelColumns = kPanelColumns_;
  static constexpr int kRowBytes = kPanelColumns * 2;  // 128, 64 or 32, and so is the permutation's period
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kCount = kColumns / kPanelColumns;
  static constexpr int kBytes = kCount * kPanelBytes;
};

// Of an SM what its blocks have, and of each block what its barriers and tables take before its tiles, which begin at a
// multiple of 1024, and what the system takes.
inline constexpr int kHopperSharedBytes = 227 * 1024;
inline constexpr int kOtherSharedBytes = 1024;
inline constexpr int kReservedSharedBytes = 1024;

// Of a thread, in eights. The warpgroups of a block share these between them: one that asks for more waits for ever.
constexpr int registers_at_entry(int threads) { return 65536 / threads / 8 * 8; }

// What q_hat k_hat^T is. Where q_hat was multiplied by scale * log2(e) beforehand: log2 P, but for the sum.
enum class Scores : std::uint8_t { raw, logarithms };

// Where tiles of k_hat come from: it was made beforehand, or is K, and tiles of it are copied; or, in the grouping of
// each block of queries, the first warpgroup picks the rows of K^T that are k_hat^T, or sums columns of K.
enum class KeySource : std::uint8_t { copied, picked, summed };

// kColumns: columns of q_hat and k_hat, padded; kValues: dv, padded. A thread block is kConsumers warpgroups that
// compute, each for 64 queries, and one that copies; where columns of K are summed one that sums and one that copies;
// where kBlocks blocks share an SM there is none, and a consumer copies as well.
template <class T, int kColumns_, int kValues_, int kConsumers_, Scores kScores_,
          KeySource kKeySource = KeySource::copied, Without kWithout_ = Without::nothing, int kBlocks_ = 1>
struct Config {
  using Element = T;
  static constexpr int kColumns = kColumns_;
  static constexpr Scores kScores = kScores_;
  static constexpr int kValues = kValues_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr KeySource kSource = kKeySource;
  static constexpr bool kPicks = kSource == KeySource::picked;
  static constexpr bool kSums = kSource == KeySource::summed;
  static constexpr Without kWithout = kWithout_;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kBlocks = kBlocks_;
  static constexpr bool kShares = kBlocks > 1;
  static constexpr int kKeys = kValues <= 64 && kConsumers == 2 && !kShares ? 256 : 128;  // of a tile
  static constexpr int kHalf = kKeys / 2;
  static constexpr int kScoreBuffers = kShares ? 1 : 2;                                // registers bound it, and kHalf
  static constexpr bool kQueriesStay = kShares || (kConsumers == 3 && kColumns > 32);  // in shared memory: registers
  static constexpr int kStages = kShares || kPicks || kSums ? 3 : 2;
  static constexpr int kWarpgroup = 128;                  // threads
  static constexpr int kFirstConsumer = kShares ? 0 : 1;  // its warpgroup
  static constexpr int kWarpgroups = kFirstConsumer + kConsumers + (kSums ? 1 : 0);
  static constexpr int kThreads = kWarpgroup * kWarpgroups;
  static constexpr int kAskRegisters = 24;
  static constexpr int kFirstRegisters = kSums ? 72 : kPicks ? 40 : kConsumers == 2 ? 24 : 32;
  static constexpr int kComputeRegisters = kSums ? 208 : kPicks ? 232 : kConsumers == 2 ? 240 : 160;

  // Whether a thread makes the i-th exponential of a half by a polynomial. At d = 64 a tile waits for the unit that
  // makes the others; more polynomials cost more than they save (docs/kernel-log.md, sm90/forward, step 39).
  static constexpr bool by_polynomial(int i) { return kValues <= 64 && !kShares && i % 16 == 8; }

  using QueryTile = Panels<64, kColumns>;                                                        // of a consumer
  using KeyTile = std::conditional_t<kPicks, Panels<kColumns, kKeys>, Panels<kKeys, kColumns>>;  // k_hat^T or k_hat
  using ValueTile = Panels<kKeys, kValues>;

  // Where columns of K are summed: tiles of K have a ring of their own, and a matrix says which columns a group has.
  struct Source {
    static constexpr int kStages = kSums ? 2 : 0;
  };
  using SourceTile = std::conditional_t<kSums, Panels<kKeys, kValues>, KeyTile>;  // of K or k_hat, as it is copied
  using GroupTile = Panels<kColumns, kValues>;
  static constexpr int kSourceBytes = kSums ? Source::kStages * SourceTile::kBytes + GroupTile::kBytes : 0;

  static constexpr int kSharedBytes =
      kConsumers * QueryTile::kBytes + kStages * (KeyTile::kBytes + ValueTile::kBytes) + kSourceBytes;
  static_assert(kBlocks * (kSharedBytes + kOtherSharedBytes + kReservedSharedBytes) <=
                kHopperSharedBytes + kReservedSharedBytes);
  static_assert(kShares || kFirstRegisters + kConsumers * kComputeRegisters + (kSums ? kAskRegisters : 0) <=
                               registers_at_entry(kThreads) * kWarpgroups);
};

// What the kernel takes by value.
struct ForwardParameters {
  CUtensorMap q, k, v;          // [columns, rows, heads, batch], boxes of a panel: 64 rows of q, kKeys of k and v
  const void* keys_transposed;  // K^T as transpose() leaves it, where its rows are picked; else k is read
  std::int64_t column_stride;   // of K^T
  const std::int32_t* order;    // [B, Hq, blocks, d]
  DeviceProblem problem;        // with the sizes and strides of O
  void* o;                      // [B, Hq, Nq, dv], any strides
  float* lse;                   // [B, Hq, Nq] or null
  bool keys_of_query_head;      // k is [B, Hq, Nk, r], fused for each query head
  Tiles tiles;                  // of the queries of this launch
  std::int64_t row_end;         // behind the last of them
  unsigned next_tile;           // tiles on, the one that an SM has next, more or less
  bool is_second;               // of two launches that may run side by side: it waits for the first at its end
};

}  // namespace distr::cuda::sm90
