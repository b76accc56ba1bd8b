// SPDX-License-Identifier: Apache-2.0
// What decides for strategy `auto` on every device (docs/auto.md). What was measured on one kind of device is in its
// backend's heuristics.h.
#pragma once

#include <cstdint>

namespace distr::common {

// Shorter blocks of queries are attended exactly: a kernel fuses K anew for every block, and its tiles of queries end
// where blocks do. On an H200 blocks of 64 rows take up to 1.42 times as long as longer ones
// (bench/results/h200/experiments/tune.json); shorter ones were not measured.
inline constexpr std::int64_t kShortestBlock = 64;

// Wider values are attended exactly; in multiples of d. A score and its part of P V cost d + dv multiply-adds, of which
// groups of two columns save d / 2. With dv = 4 d that is a gain of 1.11 at most, and `auto` wants 1.15. No measurement
// has dv other than d.
inline constexpr std::int64_t kWidestValues = 4;

// More scores of near keys than this share are attended exactly: they take all columns of Q and K. Where the others
// gain 1.2, as with groups of two columns on long sequences, a fifth of near keys leaves 1 / (0.2 + 0.8 / 1.2) = 1.15
// (docs/auto.md).
inline constexpr double kMostNear = 0.2;

}  // namespace distr::common
