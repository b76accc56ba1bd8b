// SPDX-License-Identifier: Apache-2.0
// What was measured on CPUs and is decided by it.
#pragma once

#include <array>
#include <cstdint>

#include "common/advice.h"

namespace distr::cpu {

// Where `energy` is worth its error to those who ask for it: at least 1.15 times as quick as exact attention in the
// middle of the settings, at G = 2 (bench/results/cpu/experiments/forward_f32.json; bf16 by pairs: torch_zen4.json).
// Smaller heads lose too much when half of their columns go (bench/results/cpu/minilm_report.json, d = 32).
inline constexpr std::array kCrossovers{common::Crossover{64, 2048}, common::Crossover{128, 1024}};
// With near keys pairs of bf16 gain 1.11 to 1.15 at d = 64 and N = 8192 and 16384, and 1.15 to 1.18 at d = 128
// (bench/results/cpu/near.json).
inline constexpr std::int64_t kNearPairsPay = 128;
// AMX leaves the products a still smaller part of the time: at G = 2 `energy` is 0.91 to 1.07 times as quick as exact
// attention in the forward (bench/results/cpu/torch_xeon.json).
inline constexpr bool kApproximationsPayInTiles = false;

// A tile has so many keys. It has so many queries in the backward, and in a forward with few tasks. K^T, k_hat and V of
// a tile are some 200 KB in fp32 at d = 128, which a second-level cache holds. Chosen so, not swept.
inline constexpr std::int64_t kTileQueries = 128;
inline constexpr std::int64_t kTileKeys = 128;
// A forward with many tasks has so many queries in a tile, as K^T and V of a tile of keys are packed for all of them.
// That saves a few hundredths of the time (no result file is kept), for which no thread is to go without tasks.
inline constexpr std::int64_t kTaskQueries = 256;
inline constexpr std::int64_t kTasksPerThread = 4;
// Rows whose scores go from product to softmax to P V together: 12 KB, which stay in the first-level cache. Four times
// the six rows that a product keeps in registers.
inline constexpr std::int64_t kRowsPerStep = 24;
// The same where tile registers multiply, by trials of 32, 64 and 128 rows on an Emerald Rapids (no result file is
// kept). A backward takes a whole tile's.
inline constexpr std::int64_t kRowsPerStepOfTiles = 64;
inline constexpr std::int64_t kBackwardRowsPerStepOfTiles = kTileQueries;
// Fewer tasks than this share their keys among several tasks each, of at least kMinimumSplit keys: twice the threads of
// a large desktop processor, and parts so long that to merge them costs little. Chosen so, not swept: what is cut must
// not follow from the number of threads, or results would.
inline constexpr std::int64_t kEnoughTasks = 32;
inline constexpr std::int64_t kMinimumSplit = 2048;

}  // namespace distr::cpu
