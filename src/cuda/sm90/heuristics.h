// SPDX-License-Identifier: Apache-2.0
// What was measured and is decided by it: by which product grouped scores are made, which thread blocks take the
// queries of a launch, when another kernel is quicker, how many heads a backward interleaves.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/mask.h"
#include "common/near.h"
#include "cuda/heuristics.h"

namespace distr::cuda::sm90 {

// Whether blocks of queries have groupings of their own.
[[nodiscard]] inline bool is_by_blocks(const Problem& problem, const Grouping& grouping) noexcept {
  return !is_exact(grouping) && grouping.block < problem.seq_q;
}

// The product that makes grouped scores.
enum class Product : std::uint8_t {
  precomputed,  // q_hat k_hat^T, both made beforehand: one grouping for the whole sequence
  gathered,     // q_hat k_hat^T, where k_hat^T is rows of K^T: groups of one column, by blocks
  fused,        // q_hat k_hat^T, where k_hat is sums of columns of K: few groups, by blocks
  spread        // Q~ K^T, where Q~ is q_hat spread over the d columns: other groupings
};

// By blocks, sums of K's columns for each block of queries cost as much as products of d/2 columns save, and pay for
// d/4 (docs/kernel-log.md, sm90/forward, steps 55 and 59). Columns that are dropped are saved, but beside K^T, which is
// made first, and at d = 64 without the kernels of three consumers and of two blocks an SM: that pays for few columns
// and many keys (step 56). With near keys k_hat has shapes for wide heads: in bf16 where nothing is skipped, and
// of one grouping where far keys are skipped and not finished (steps 84, 88 and 89).
[[nodiscard]] inline Product product_of(const Problem& problem, const Grouping& grouping) {
  constexpr std::int64_t kFusingRows = 128;  // of a thread block, which makes k_hat for all of them
  constexpr std::int64_t kFewKeys = 4096;
  constexpr std::int64_t kFewGathered = 16, kFewFused = 32;  // groups
  const bool has_near_keys = common::has_near_keys(grouping);
  const std::int64_t groups = num_groups(problem, grouping);
  const bool is_wide = problem.head_dim > 64;
  if (has_near_keys) {
    const bool skips = grouping.skip > 0;
    const bool has_shape = is_wide && groups <= 64 && (problem.dtype == DType::bf16 || skips);
    if (!is_by_blocks(problem, grouping)) {
      return has_shape && !(skips && grouping.finish) ? Product::precomputed : Product::spread;
    }
    return has_shape && !skips && common::members_of(grouping) == 1 ? Product::gathered : Product::spread;
  }
  if (!is_by_blocks(problem, grouping)) {
    return Product::precomputed;
  }
  if (grouping.block % kFusingRows != 0) {
    return Product::spread;
  }
  const bool is_bf16 = problem.dtype == DType::bf16;  // which the rarer shapes are compiled for alone
  if (common::members_of(grouping) == 1) {
    const bool is_narrow = is_bf16 && groups <= kFewGathered && !common::has_window(problem);
    return is_wide || (is_narrow && problem.seq_k > kFewKeys) ? Product::gathered : Product::spread;
  }
  return is_wide && is_bf16 && groups <= kFewFused ? Product::fused : Product::spread;
}

// Whether exact attention that skips far keys goes by a shape without room for other queries of far keys. It has three
// stages for K and V, and takes 0.95 of the time at d = 64. At d = 128 as many have no room, and two do as well
// (docs/kernel-log.md, sm90/forward, step 88).
[[nodiscard]] inline bool votes_by_one_set_of_queries(const Problem& problem) {
  return std::max(problem.head_dim, problem.head_dim_v) <= 64;
}

// Whether sm80/forward is quicker, which splits the keys between thread blocks: few queries with many keys.
[[nodiscard]] inline bool leaves_sms_idle(const Problem& problem, std::int64_t num_sms) {
  constexpr std::int64_t kTileRows = 128;
  constexpr std::int64_t kManyKeys = 2048;
  const std::int64_t tiles = problem.batch * problem.heads_q * common::ceil_div(problem.seq_q, kTileRows);
  return 4 * tiles < num_sms && problem.seq_k > kManyKeys;
}

// Whether all sequences are packed and have at most so many rows and keys.
[[nodiscard]] inline bool are_packed_within(const Problem& problem, std::int64_t most) {
  return problem.packed.has_value() && std::max(problem.seq_q, problem.seq_k) <= most;
}

// Whether sm80/sequences is quicker, which puts the rows of several query heads into a tile and splits the keys:
// lengths that are data, of few rows, at most or in the middle. Measured (log, step 73), packed and causal, 16 heads of
// 4: at d = 64 it takes 0.59 of Hopper's time for sequences of 256 and 0.72 for 512, but 1.26 for a mean of 565 with
// long ones among them; at d = 128 0.98 for 128 and 1.09 for 256.
[[nodiscard]] inline bool has_few_rows(const Problem& problem) {
  const bool is_narrow = problem.head_dim <= 64;
  const std::int64_t mean =
      problem.packed.has_value() ? problem.packed->total_q / std::max<std::int64_t>(problem.batch, 1) : problem.seq_q;
  const bool is_short = is_narrow && problem.causal != Causal::none && are_packed_within(problem, 512);
  return common::has_lengths(problem) && (mean < (is_narrow ? 384 : 64) || is_short);
}

// Whether sm80/backward is quicker, and takes them: packed sequences, all of them short. Causal, of 16 heads of 4, its
// backward takes 0.54, 0.68 and 0.89 of Hopper's time for 128, 256 and 512 rows at d = 128, and 0.68, 0.91 and 1.25 at
// d = 64 (log, step 73). Without causality rows meet twice as many keys, and where each query head has its own K Hopper
// has no parts of dK and dV to add: neither was measured, and each halves what counts as short.
[[nodiscard]] inline bool has_short_sequences(const Problem& problem) {
  const std::int64_t most = (problem.head_dim <= 64 ? 256 : 512) / (problem.causal == Causal::none ? 2 : 1) /
                            (problem.heads_q == problem.heads_kv ? 2 : 1);
  return are_packed_within(problem, most) && problem.dtype == DType::bf16 && !problem.window_left.has_value() &&
         problem.softcap == 0;
}

// Keys that a row of a sliding window sees, the first and the last rows apart.
[[nodiscard]] inline std::int64_t window_keys(const Problem& problem) noexcept {
  const common::Band band = common::band_of(problem);
  return std::min(band.last - band.first + 1, problem.seq_k);
}

// Whether the i-th exponential of a half of a thread's scores is a polynomial's. At dv = 64 a tile waits for the unit
// that makes the others; more polynomials cost more than they save (docs/kernel-log.md, sm90/forward, step 39).
[[nodiscard]] constexpr bool is_by_polynomial(int values, int ctas_per_sm, int i) noexcept {
  return values <= 64 && ctas_per_sm == 1 && i % 16 == 8;
}

// Queries of a thread block of two consumers, and of three.
inline constexpr std::int64_t kRowsOfTwo = 128;
inline constexpr std::int64_t kRowsOfThree = 192;

// Which kinds of thread blocks take the queries of a launch: of two consumers, of three, or of two that share an SM
// with another block. A row costs less with three (docs/kernel-log.md, sm90/forward, step 18), but the GPU runs whole
// waves of blocks, and the last one may be all but empty. Blocks that share an SM are slower, but one's end and start
// are hidden by the other, so they are for short sequences (step 32).
struct Waves {
  std::int64_t heads;    // of the whole batch
  std::int64_t rows;     // queries of a head
  std::int64_t keys;     // of a head
  std::int64_t num_sms;  // SMs of the GPU
  bool causal;           // blocks then end one by one instead of in waves

  // Of a block for each tile of so many rows: in rows of a block of two consumers.
  [[nodiscard]] double cost(std::int64_t queries, std::int64_t tile_rows) const noexcept {
    constexpr double kThree = 0.96;
    const auto blocks = static_cast<double>(heads * common::ceil_div(queries, tile_rows));
    const double waves = blocks / static_cast<double>(num_sms);
    return (causal ? waves : std::ceil(waves)) * static_cast<double>(tile_rows) *
           (tile_rows == kRowsOfThree ? kThree : 1);
  }

  // Whether blocks of two consumers end sooner where two share an SM. Times in those that such a block takes for a tile
  // of 128 keys alone on its SM.
  [[nodiscard]] bool is_quicker_sharing() const noexcept {
    constexpr double kPair = 2.23;  // a tile of each of two blocks that share
    constexpr double kEnds = 5;     // a block's start and end
    const auto time = [&](std::int64_t blocks_at_once, double tile) {
      const auto blocks = static_cast<double>(heads * common::ceil_div(rows, kRowsOfTwo));
      const double waves = blocks / static_cast<double>(blocks_at_once);
      const double longest = static_cast<double>(common::ceil_div(keys, std::int64_t{128})) * tile + kEnds;
      return causal ? std::max(waves * (longest + kEnds + tile) / 2, longest) : std::ceil(waves) * longest;
    };
    return time(2 * num_sms, kPair) < time(num_sms, 1);
  }

  // Rows of every head, from its first on, for blocks of three consumers; those of two take the rest.
  [[nodiscard]] std::int64_t rows_for_three() const noexcept {
    std::int64_t best = cost(rows, kRowsOfThree) < cost(rows, kRowsOfTwo) ? rows : 0;
    const std::int64_t whole_waves = heads * (rows / kRowsOfThree) / num_sms;
    const std::int64_t filled = std::min(whole_waves * num_sms / heads * kRowsOfThree, rows);
    const double of_both = cost(filled, kRowsOfThree) + cost(rows - filled, kRowsOfTwo);
    return !causal && of_both < std::min(cost(rows, kRowsOfThree), cost(rows, kRowsOfTwo)) ? filled : best;
  }
};

// How many heads a backward interleaves (cuda/backward_scheduler.cuh): those whose Q, dO and sums of dQ stay in the L2
// together, but enough for two thread blocks an SM, or four where attention is causal, so that the long ones of the
// last heads do not begin late. More make a call of many heads slower by up to 6 % (docs/kernel-log.md, sm90/backward,
// step 14). columns, values: the kernel's.
[[nodiscard]] inline int interleaved_backward_heads(const Problem& problem, std::int64_t columns, std::int64_t values,
                                                    std::int64_t key_tile_rows, std::int64_t num_sms) {
  constexpr std::int64_t kCacheBytes = std::int64_t{36} << 20;
  const std::int64_t ctas_per_sm = problem.causal == Causal::none ? 2 : 4;
  const std::int64_t bytes_per_head = problem.seq_q * (2 * (columns + values) + 4 * columns);
  const std::int64_t ctas_per_head = common::ceil_div(problem.seq_k, key_tile_rows);
  const std::int64_t enough = common::ceil_div(ctas_per_sm * num_sms, ctas_per_head);
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t sets = std::max(heads / std::max(kCacheBytes / bytes_per_head, enough), std::int64_t{1});
  return static_cast<int>(common::ceil_div(heads, sets));  // none of them much smaller than the others
}

// Where the last round of a backward's blocks of keys begins, and into how many pieces each of its blocks is split.
struct LastRound {
  std::int64_t first, pieces;
};

// An SM runs a block at a time. Where attention is not causal all take as long, so that a last round that has blocks
// for few SMs leaves the others idle. Its blocks are split by queries, for as many SMs as there are
// (docs/kernel-log.md, sm90/backward, step 18). blocks: of 128 keys, of all heads.
[[nodiscard]] inline LastRound split_of_last_round(std::int64_t blocks, std::int64_t query_tiles,
                                                   std::int64_t num_sms) noexcept {
  constexpr std::int64_t kFewestTiles = 8;  // of a piece: to begin takes it as long as two, and then there is its sum
  const std::int64_t rest = blocks % num_sms;
  const std::int64_t pieces = rest == 0 ? 1 : std::min(num_sms / rest, query_tiles / kFewestTiles);
  return pieces < 2 ? LastRound{blocks, 1} : LastRound{blocks - rest, pieces};
}

// Sinks' blocks meet all tiles of queries, one after another, and run beside the launch of far tiles, which they must
// not outlast (docs/kernel-log.md, sm90/backward, step 21). sinks: blocks, of all heads.
[[nodiscard]] inline std::int64_t pieces_of_sinks(std::int64_t sinks, std::int64_t query_tiles,
                                                  std::int64_t num_sms) noexcept {
  constexpr std::int64_t kFewestTiles = 8;  // of a piece
  return sinks == 0 ? 1 : std::max(std::int64_t{1}, std::min(num_sms / sinks, query_tiles / kFewestTiles));
}

}  // namespace distr::cuda::sm90
