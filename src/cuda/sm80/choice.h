// SPDX-License-Identifier: Apache-2.0
// Tiles of 64 or of 128 queries, where both are compiled: the choice for every (d, r), as `distr tune` measured it on
// an NVIDIA H200 (bench/results/h200/experiments/tune_tiles.json, to which tests/gpu/choice_test.cpp holds it).
#pragma once

#include <array>

namespace distr::cuda::sm80 {

// Tiles of 64 queries are quicker while there is little to do, as they spread over more SMs, and longer so where rows
// are causal, whose ends they meet closer; then tiles of 128, which read K and V half as often. What decides is the
// work: scores (pairs of a query and a key that see each other, of all heads) for each SM, whatever heads and lengths
// make them up. Choosing so loses 0.9 % of the time at most, mean over H = 1, 10 and N = 512 to 16384; tiles of 128
// alone lose up to 12 %, and up to 50 % for one size.
struct Crossover {
  int dim, groups, members;  // Config's
  double scores, causal;     // thousands an SM, up to which 64 are quicker
};

inline constexpr std::array kCrossovers = {
    Crossover{32, 32, 1, 25, 200},    Crossover{64, 64, 1, 400, 200},  Crossover{64, 32, 1, 25, 200},
    Crossover{64, 16, 1, 25, 200},    Crossover{64, 32, 2, 25, 25},    Crossover{64, 16, 4, 25, 200},
    Crossover{128, 128, 1, 100, 200}, Crossover{128, 64, 1, 100, 200}, Crossover{128, 32, 1, 25, 200},
    Crossover{128, 64, 2, 25, 50},    Crossover{128, 32, 4, 25, 6},
};

// The rows of a tile to prefer for a launch of `scores` an SM.
[[nodiscard]] constexpr int chosen_rows(int dim, int groups, int members, bool causal, double scores) noexcept {
  for (const Crossover& entry : kCrossovers) {
    if (entry.dim == dim && entry.groups == groups && entry.members == members) {
      return scores <= (causal ? entry.causal : entry.scores) * 1e3 ? 64 : 128;
    }
  }
  return 128;
}

}  // namespace distr::cuda::sm80
