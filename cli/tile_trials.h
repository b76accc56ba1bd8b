// SPDX-License-Identifier: Apache-2.0
// Times the forward's compiled tiles, and the block lengths that they allow, on this GPU, beside what the paper's rule
// would take.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comparison.h"
#include "distr/blocks.h"
#include "distr/plan.h"

namespace distr::cli {

inline constexpr const char* kTunedKernel = "sm80/forward";

// One tile at one block length. Exact attention has no blocks.
struct Candidate {
  Grouping grouping;
  TileShape tile;
  bool taken;                           // whether the kernel takes this tile at this block length
  std::vector<double> ms, ms_grouping;  // of each run, and of its grouping; both ascending

  [[nodiscard]] double median() const { return Row::median_of(ms); }
};

// One problem and one way to group, with all that was measured.
struct Trial {
  Problem problem;
  BlockChoice rule;
  std::vector<Candidate> candidates;
  const Candidate* best = nullptr;
  const Candidate* ruled = nullptr;  // the one nearest to the paper's rule
  const Candidate* taken = nullptr;  // the kernel's own at the default block length; null: it was not measured

  // The candidate with tiles of `rows` queries at the default block length; null: there is none.
  [[nodiscard]] const Candidate* with_rows(std::int64_t rows) const;
  // How many scores there are: pairs of a query and a key that it sees, over all heads.
  [[nodiscard]] double scores() const;
};

// Measures every setting of `groupings` on `inputs`, each with all of `blocks` unless it is exact. Settings that no
// kernel of the family serves are left out. Throws Error.
[[nodiscard]] std::vector<Trial> measure_trials(const Inputs& inputs, const std::vector<Grouping>& groupings,
                                                const std::vector<std::int64_t>& blocks, int repeats);

// Where large tiles become the quicker ones.
struct Crossover {
  double scores;  // up to so many scores tiles of 64 queries are taken, from there on tiles of 128
  double loss;    // time of the tiles chosen so over that of the best tiles, geometric mean over the trials
  double taken;   // the same for the tiles that the kernel takes
};

// The crossover of trials that differ only in their sizes. Empty if no trial has both tiles.
[[nodiscard]] std::optional<Crossover> crossover_of(const std::vector<const Trial*>& trials);

}  // namespace distr::cli
