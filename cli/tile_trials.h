// SPDX-License-Identifier: Apache-2.0
// The forward's compiled tiles and the block lengths that they allow, timed on this GPU; what the paper's rule would
// take, and what is best.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comparison.h"
#include "distr/blocks.h"
#include "distr/plan.h"

namespace distr::cli {

inline constexpr const char* kTunedKernel = "sm80/forward";

// One tile at one block length; exact attention has no blocks.
struct Candidate {
  Grouping grouping;
  TileShape tile;
  bool taken;                           // by the kernel at this block length
  std::vector<double> ms, ms_grouping;  // of runs, and the grouping's part; ascending

  [[nodiscard]] double median() const { return Row::median_of(ms); }
};

// One problem and one way to group, with all that was measured.
struct Trial {
  Problem problem;
  BlockChoice rule;
  std::vector<Candidate> candidates;
  const Candidate* best = nullptr;
  const Candidate* ruled = nullptr;  // the nearest to the rule
  const Candidate* taken = nullptr;  // by the kernel at the default block length; null: that was not measured

  // The candidate with tiles of `rows` queries at the default block length; null: there is none.
  [[nodiscard]] const Candidate* with_rows(std::int64_t rows) const;
  // Pairs of a query and a key that see each other, of all heads.
  [[nodiscard]] double scores() const;
};

// Measures every setting of `groupings` on `inputs`, each with all of `blocks` unless it is exact, and leaves out what
// no kernel of the family serves. Throws Error.
[[nodiscard]] std::vector<Trial> measure_trials(const Inputs& inputs, const std::vector<Grouping>& groupings,
                                                const std::vector<std::int64_t>& blocks, int repeats);

// Where large tiles begin to be the quicker ones.
struct Crossover {
  double scores;  // tiles of 64 queries up to here, of 128 from here on
  double loss;    // time with tiles chosen so relative to the best tiles, geometric mean over the trials
  double taken;   // likewise for those that the kernel takes
};

// For trials that differ in nothing but sizes. Empty where none of them has both tiles.
[[nodiscard]] std::optional<Crossover> crossover_of(const std::vector<const Trial*>& trials);

}  // namespace distr::cli
