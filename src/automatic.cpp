// SPDX-License-Identifier: Apache-2.0
// Strategy `auto`: exact attention where an approximation cannot pay, else the strategy that measures best.
#include <algorithm>
#include <array>
#include <string>

#include "dispatch.h"

namespace distr {
namespace {

// Where `energy` is worth its error. Smaller heads lose too much when half of their columns go; on shorter sequences it
// was less than 1.15 times as quick as exact attention. The numbers are in DESIGN.md, "What auto chooses".
struct Crossover {
  Device device;
  std::int64_t head_dim;  // from this d on
  std::int64_t seq;       // and from so many rows of Q, and of K, on
};

constexpr std::array<Crossover, 1> kCrossovers{{{Device::cpu, 64, 512}}};

// Shorter blocks fuse K more often than the smaller product saves; wider values leave little to save.
constexpr std::int64_t kShortestBlock = 64;
constexpr std::int64_t kWidestValues = 4;  // times head_dim

}  // namespace

Resolved resolve(const Problem& problem, const Grouping& grouping, Device device) {
  if (grouping.strategy != Strategy::automatic) {
    return {grouping, "as asked for"};
  }
  Resolved result{grouping, {}};
  result.grouping.strategy = Strategy::exact;
  const auto* const needed = std::find_if(kCrossovers.begin(), kCrossovers.end(),
                                          [device](const Crossover& entry) { return entry.device == device; });
  const std::int64_t shorter = std::min(problem.seq_q, problem.seq_k);
  if (needed == kCrossovers.end()) {
    result.choice = "exact, as no approximation has been measured on this device";
  } else if (grouping.group_size == 1) {
    result.choice = "exact, as group size 1 is exact attention";
  } else if (problem.dtype == DType::f64) {
    result.choice = "exact, as the float64 reference gains nothing from an approximation";
  } else if (problem.head_dim < needed->head_dim) {
    result.choice = "exact, as heads of head_dim " + std::to_string(problem.head_dim) +
                    " lose too much to an approximation (from " + std::to_string(needed->head_dim) + " on it can pay)";
  } else if (shorter < needed->seq) {
    result.choice = "exact, as " + std::to_string(shorter) +
                    " rows or keys are too few for an approximation to pay (from " + std::to_string(needed->seq) +
                    " on it does)";
  } else if (grouping.block < kShortestBlock) {
    result.choice = "exact, as blocks of " + std::to_string(grouping.block) +
                    " rows share too little work for an approximation to pay (from " + std::to_string(kShortestBlock) +
                    " on they do)";
  } else if (problem.head_dim_v > kWidestValues * problem.head_dim) {
    result.choice =
        "exact, as nearly all work is the product with V, whose head_dim_v is " + std::to_string(problem.head_dim_v);
  } else {
    result.grouping.strategy = Strategy::energy;
    result.choice = "energy, which pays from " + std::to_string(needed->seq) + " rows and keys on, and errs least";
  }
  return result;
}

}  // namespace distr
