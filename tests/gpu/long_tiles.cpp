// SPDX-License-Identifier: Apache-2.0
#include "gpu/long_tiles.h"

#include <algorithm>
#include <string>

#include "tiles.h"

namespace distr::test {
namespace {

// The tile of 128 queries; `reason`: why there is none, or empty.
tuning::Tile long_tile(const Problem& problem, const Grouping& grouping, std::string& reason) {
  const auto tiles = tuning::forward_tiles(problem, grouping, reason);
  const auto found = std::find_if(tiles.begin(), tiles.end(), [](const auto& tile) { return tile.rows == 128; });
  if (found != tiles.end()) {
    return *found;
  }
  reason = reason.empty() ? "has no tiles of 128 queries" : reason;
  return {};
}

std::string supports(const Problem& problem, const Grouping& grouping) {
  std::string reason;
  static_cast<void>(long_tile(problem, grouping, reason));
  return reason;
}

std::size_t workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  std::string reason;
  return tuning::workspace_bytes(problem, grouping, long_tile(problem, grouping, reason));
}

void run(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const Execution& execution) {
  std::string reason;
  tuning::forward(problem, grouping, tensors, execution, long_tile(problem, grouping, reason));
}

constexpr ForwardKernel kKernels[] = {{"sm80/forward, 128 rows", Device::cuda, supports, workspace_bytes, run}};

}  // namespace

std::span<const ForwardKernel> long_tiles() { return kKernels; }

}  // namespace distr::test
