// SPDX-License-Identifier: Apache-2.0
// Which kinds of thread blocks take the queries of a launch: of two consumers, of three, or of two that share an SM
// with another block. A row costs less with three (docs/kernel-log.md, sm90/forward, step 18), but the GPU runs whole
// waves of blocks, and the last one may be all but empty. Blocks that share an SM are slower, but one's end and start
// are hidden by the other, so they are for short sequences (step 32).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/element.h"

namespace distr::cuda::sm90 {

inline constexpr std::int64_t kRowsOfTwo = 128;
inline constexpr std::int64_t kRowsOfThree = 192;

struct Launched {
  std::int64_t heads;       // of the whole batch
  std::int64_t rows;        // queries of a head
  std::int64_t keys;        // of a head
  std::int64_t processors;  // SMs of the GPU
  bool causal;              // blocks then end one by one instead of in waves

  // Of a block for each tile of so many rows: in rows of a block of two consumers.
  [[nodiscard]] double cost(std::int64_t queries, std::int64_t tile_rows) const noexcept {
    constexpr double kThree = 0.96;
    const auto blocks = static_cast<double>(heads * common::ceil_div(queries, tile_rows));
    const double waves = blocks / static_cast<double>(processors);
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
    return time(2 * processors, kPair) < time(processors, 1);
  }

  // Rows of every head, from its first on, for blocks of three consumers; those of two take the rest.
  [[nodiscard]] std::int64_t rows_for_three() const noexcept {
    std::int64_t best = cost(rows, kRowsOfThree) < cost(rows, kRowsOfTwo) ? rows : 0;
    const std::int64_t whole_waves = heads * (rows / kRowsOfThree) / processors;
    const std::int64_t filled = std::min(whole_waves * processors / heads * kRowsOfThree, rows);
    const double of_both = cost(filled, kRowsOfThree) + cost(rows - filled, kRowsOfTwo);
    return !causal && of_both < std::min(cost(rows, kRowsOfThree), cost(rows, kRowsOfTwo)) ? filled : best;
  }
};

}  // namespace distr::cuda::sm90
