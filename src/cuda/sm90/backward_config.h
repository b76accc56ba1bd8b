// SPDX-License-Identifier: Apache-2.0
// The compiled shapes of the sm_90a backward kernel. Everything that sizes registers or shared memory is here.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <type_traits>

#include "cuda/prepare/stats_columns.cuh"
#include "cuda/problem.h"
#include "cuda/score_cap.h"
#include "cuda/sm90/backward_convert.h"
#include "cuda/sm90/backward_split.h"
#include "cuda/sm90/config.h"

namespace distr::cuda::sm90 {

template <class P>
class RegisterOperand;
template <class P>
class SharedOperandRows;
class RegisterOnes;
class SharedOnes;

// kColumns: columns of Q and K (backward.cuh), padded; kValues: dv, padded. A thread block is a producer warpgroup,
// which brings tiles to shared memory and dQ from there, two consumers of 64 keys each, and, where there is one, who
// makes dQ of both.
template <class T, int kColumns_, int kValues_>
struct BackwardConfig {
  using Element = T;
  static constexpr int kColumns = kColumns_;
  static constexpr int kValues = kValues_;
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = 64 * kConsumers;
  static constexpr int kRows = kQueryTileRows;            // queries of a tile
  static constexpr int kStages = kColumns <= 64 ? 3 : 2;  // of Q and dO, and buffers of dS^T and dQ
  // A warpgroup of its own makes dQ, where consumers spare the registers. Then they take turns at P and dS, and dO
  // shares the barriers of Q. Else they make a half of the columns each.
  static constexpr bool kDqApart = kColumns <= 64;
  static constexpr int kDqWarpgroups = kDqApart ? 1 : kConsumers;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers + kDqApart);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = kDqApart ? 208 : 240;
  static constexpr int kDqRegisters = 72;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters + kDqApart * kDqRegisters <=
                registers_at_entry(kThreads) * (1 + kConsumers + kDqApart));

  // Whether consumers that take turns start dV before they make dS: where there are registers enough.
  static constexpr bool kDvFirst = kDqApart && kValues <= 64;

  using KeyTile = Panels<kKeys, kColumns>;
  static_assert(KeyTile::kCount == kDqWarpgroups);  // a panel is a warpgroup's part of dQ's columns
  using ValueTile = Panels<kKeys, kValues>;
  using QueryTile = Panels<kRows, kColumns>;
  using DoTile = Panels<kRows, kValues>;  // of dO
  using DsTile = Panels<kKeys, kRows>;    // of dS^T
  // K and V are left operands, in registers as far as there are any left beside the sums.
  using KeyOperand =
      std::conditional_t<kColumns + kValues <= 160, RegisterOperand<KeyTile>, SharedOperandRows<KeyTile>>;
  using ValueOperand =
      std::conditional_t<kColumns + kValues <= 96, RegisterOperand<ValueTile>, SharedOperandRows<ValueTile>>;

  static constexpr bool kCapsScores = kColumns == kValues;  // where it is asked to: the shapes of exact attention
  static constexpr bool kTakesLengths = kCapsScores;        // packed sequences

  static_assert(kRows == kStatsTile);
  // Where statistics have no room of their own, they come to the place of the tile's dS^T, once for each consumer, to
  // the half that it will store. It does so when it has read them.
  static constexpr bool kStatsInDs = !kDqApart;
  static constexpr int kStatsCopies = kStatsInDs ? kConsumers : 1;
  // The ones that add statistics to scores are a left operand like K and V, in registers if there are any left.
  static constexpr bool kOnesInShared = kColumns == 64 && kValues == 128;
  using Ones = std::conditional_t<kOnesInShared, SharedOnes, RegisterOnes>;
  static constexpr int kDqBytes = kRows * kColumns * 4;  // of dQ
  static constexpr int kDsSumsBytes = kRows * 4;         // of rows' sums of dS, behind it
};

// What a thread block has of its own where sequences are packed: rows and keys count from its sequence's first.
struct KeySequence {
  int rows, keys, causal_offset, first_offset;
  int head, number;         // of the block of keys
  int first_key;            // in K
  int row_axis, key_axis;   // TMA's last coordinates (batch_entry.cuh)
  int stats_row, sums_key;  // the first of a head's statistics and sums of dQ, and of its parts of dK and dV
};

// A left operand of ones in its first columns, and of zeros.
struct alignas(128) OnesTile {
  std::uint32_t ones[8][4], zeros[8][4];  // of eight rows, which serve for all
};

// A thread block's shared memory: K and V, which stay, rings of Q, dO, their statistics, dS^T and dQ, and barriers.
template <class C>
struct BackwardStorage {
  SharedTile<typename C::KeyTile> keys;
  SharedTile<typename C::ValueTile> values;
  SharedTile<typename C::QueryTile> queries[C::kStages];
  SharedTile<typename C::DoTile> d_o[C::kStages];
  SharedTile<typename C::DsTile> d_s[C::kStages];
  // Operands that repeat rows or columns. memcheck takes them for 2 KB without a gap, so they do not lie at the end.
  alignas(128) std::conditional_t<C::kStatsInDs, NoEntry, std::array<StatsColumns, C::kStages>> stats;
  std::conditional_t<C::kOnesInShared, OnesTile, NoEntry> ones;
  struct DqBuffer {
    std::uint8_t d_q[C::kDqBytes];
    float ds_sums[C::kRows];  // of dS over the keys (backward_ds_sums.cuh)
  };
  alignas(128) DqBuffer d_q[C::kStages];
  struct Barriers {
    Barrier keys_full, values_full;
    Barrier queries_full[C::kStages], queries_empty[C::kStages];  // and statistics
    Barrier d_o_full[C::kStages], d_o_empty[C::kStages];          // unless dO shares those of Q
    Barrier d_q_full[C::kStages], d_q_empty[C::kStages];
    Barrier d_s_full[C::kStages];
    Barrier pingpong[C::kConsumers];  // whose P and dS are next
  } barriers;
  unsigned block;  // the thread block, in the order in which they begin
  std::conditional_t<C::kTakesLengths, KeySequence, NoEntry> sequence;
};

// Which tiles of queries the blocks of keys of a launch meet: all that see them, or of these the ones that the keys are
// near to, or far from (method, 8).
enum class QueryTiles : std::uint8_t { all, near, far };

// What takes the place of Q, its statistics and the sums of dQ where the keys are near.
struct NearQueries {
  CUtensorMap q;
  const StatsColumns* stats;
  float* dq_accum;  // behind each tile rows' sums of dS, if wanted, else room for them
  bool sums_ds;     // they are wanted
};

// What the kernel takes by value.
struct BackwardParameters {
  CUtensorMap q, k, v, d_o;  // [columns, rows, heads, batch], boxes of a panel
  DeviceProblem problem;     // without near keys where all scores are of the same columns
  QueryTiles tiles;
  NearQueries near;
  const StatsColumns* stats;  // [B, Hq, stats_rows / 64]
  std::int64_t stats_rows;    // Nq, up to a multiple of 128
  float* dq_accum;         // dq_hat or dQ~ / scale, in fragments (backward_convert.h) of kQueryTileRows rows; with near
                           // keys they begin as zeros
  unsigned* dq_semaphore;  // [B, Hq, tiles of queries]: blocks of keys that have added to the tile; or null: any order
  unsigned* ticket;        // blocks that have started; null: any order, so it does not matter
  float scale;
  ScoreCap score_cap;  // of kernels that cap scores
  // Where a KV head has one query head and columns are as they were given, dK and dV are written as they are wanted;
  // else (parts are not null) for each query head in fp32, in fragments of kKeyTileRows rows, without the scale.
  void *d_k, *d_v;
  Strides d_k_strides, d_v_strides;
  float *d_k_parts, *d_v_parts;
  bool keys_of_query_head;  // k is [B, Hq, Nk, r], fused for each query head
  int interleaved;          // heads, at a time (cuda/backward_scheduler.cuh)
  SplitKeys split;
  // What near keys found of dV, as d_v_parts and the pieces of that launch have it, in so many columns: a launch of far
  // tiles adds it to its own. Or null: convert_sums() does.
  const float* near_d_v;
  int near_values;
  SplitKeys near_split;
  std::int64_t key_rows;  // of a head's parts
  DeviceLengths lengths;  // of packed sequences; then stats_rows are those of dQ's sums as well
};

}  // namespace distr::cuda::sm90
