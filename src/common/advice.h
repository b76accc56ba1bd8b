// SPDX-License-Identifier: Apache-2.0
// What strategy `auto` is told, in the same words by every backend (method, 2, "Strategy auto").
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "distr/problem.h"

namespace distr {

// What strategy `auto` is told by the device's backend.
struct Advice {
  bool pays = false;  // `energy` at the grouping's group size is worth its error
  std::string why;    // "which pays from 2048 rows and keys on"; else "as ..."
};

}  // namespace distr

namespace distr::common {

// From where on an approximation is worth its error.
struct Crossover {
  std::int64_t head_dim;  // from this d on
  std::int64_t seq;       // and from so many rows of Q, and of K, on
};

// By the last of the crossovers, which are in the order of their head dims, that has no larger d than the problem.
[[nodiscard]] inline Advice advice_by(std::span<const Crossover> crossovers, const Problem& problem) {
  const Crossover& smallest = crossovers.front();
  if (problem.head_dim < smallest.head_dim) {
    return {false, "as heads of head_dim " + std::to_string(problem.head_dim) +
                       " lose too much to an approximation (from " + std::to_string(smallest.head_dim) +
                       " on it can pay)"};
  }
  const auto behind = std::find_if(crossovers.begin(), crossovers.end(),
                                   [&](const Crossover& crossover) { return crossover.head_dim > problem.head_dim; });
  const std::int64_t seq = (behind - 1)->seq;
  const std::int64_t shorter = std::min(problem.seq_q, problem.seq_k);
  if (shorter < seq) {
    return {false, "as " + std::to_string(shorter) + " rows or keys are too few for an approximation to pay (from " +
                       std::to_string(seq) + " on it does)"};
  }
  return {true, "which pays from " + std::to_string(seq) + " rows and keys on, and errs least"};
}

}  // namespace distr::common
