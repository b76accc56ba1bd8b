// SPDX-License-Identifier: Apache-2.0
#include "tiles.h"

#include "cuda/launch.h"
#include "cuda/sm80/forward_launch.h"

namespace distr::tuning {

std::vector<Tile> forward_tiles(const Problem& problem, const Grouping& grouping, std::string& reason) {
  reason = cuda::sm80::forward_supports(problem, grouping);
  if (reason.empty()) {
    reason = cuda::unusable_reason();
  }
  return reason.empty() ? cuda::sm80::forward_tiles(problem, grouping) : std::vector<Tile>{};
}

std::size_t workspace_bytes(const Problem& problem, const Grouping& grouping, const Tile& tile) {
  const cuda::sm80::ForcedRows forced(tile.rows);
  return cuda::sm80::forward_workspace_bytes(problem, grouping, 1);
}

void forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
             const Execution& execution, const Tile& tile) {
  const cuda::sm80::ForcedRows forced(tile.rows);
  cuda::sm80::run_forward(problem, grouping, tensors, execution);
}

}  // namespace distr::tuning
