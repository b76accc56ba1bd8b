// SPDX-License-Identifier: Apache-2.0
// How the plain kernels cut a problem: tiles of up to 64 rows, none across two blocks of Q.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/problem.h"

namespace distr::cuda::plain {

inline constexpr int kSide = 64;  // rows and keys of a tile

// Exact attention has one order, hence one block, unless its blocks have near keys of their own.
[[nodiscard]] inline DeviceProblem tiled_problem(const Problem& problem, const Grouping& grouping) {
  DeviceProblem result = device_problem(problem, grouping);
  if (result.exact && !result.near.has) {
    result.block = std::max<std::int64_t>(problem.seq_q, 1);
    result.blocks = common::ceil_div(problem.seq_q, result.block);
  }
  return result;
}

[[nodiscard]] inline std::int64_t tiles_of_block(const DeviceProblem& problem) {
  return common::ceil_div(std::min(problem.block, problem.seq_q), kSide);
}

[[nodiscard]] inline std::int64_t num_tiles(const DeviceProblem& problem) {
  return problem.batch * problem.heads_q * problem.blocks * tiles_of_block(problem);
}

}  // namespace distr::cuda::plain
