// SPDX-License-Identifier: Apache-2.0
#include "cuda/plain/plain.h"

#include <algorithm>
#include <limits>

#include "cuda/plain/tiles.h"

namespace distr::cuda::plain {

std::string supports(const Problem& problem, const Grouping& grouping) {
  constexpr double kMax = std::numeric_limits<std::int32_t>::max();  // of grid.x
  if (problem.dtype == DType::f64) {
    return "computes in fp32; f64 is for the reference";
  }
  // Counted as double: int64 could overflow.
  const auto count = [&](std::int64_t heads, std::int64_t tiles) {
    return static_cast<double>(problem.batch) * static_cast<double>(heads) * static_cast<double>(tiles);
  };
  const DeviceProblem tiled = tiled_problem(problem, grouping);
  const double tiles = count(problem.heads_q, tiled.blocks) * static_cast<double>(tiles_of_block(tiled));
  const double key_tiles = count(problem.heads_kv, common::ceil_div(problem.seq_k, kSide));
  if (std::max(tiles, key_tiles) > kMax) {
    return "the grid would have more than 2147483647 tiles of 64 rows";
  }
  return "";
}

}  // namespace distr::cuda::plain
