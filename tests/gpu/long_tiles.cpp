// SPDX-License-Identifier: Apache-2.0
#include "gpu/long_tiles.h"

#include <algorithm>
#include <string>

#include "cuda/sm80/forward_launch.h"

namespace distr::test {
namespace {

namespace sm80 = cuda::sm80;

constexpr std::int64_t kRows = 128;

std::string supports(const Problem& problem, const Grouping& grouping) {
  std::string reason = sm80::forward_supports(problem, grouping);
  if (reason.empty()) {
    const auto tiles = sm80::forward_tiles(problem, grouping);
    const bool has_one = std::any_of(tiles.begin(), tiles.end(), [](const auto& tile) { return tile.rows == kRows; });
    reason = has_one ? "" : "has no tiles of 128 queries";
  }
  return reason;
}

std::size_t workspace_bytes(const Problem& problem, const Grouping& grouping, int threads) {
  const sm80::ForcedRows forced(kRows);
  return sm80::forward_workspace_bytes(problem, grouping, threads);
}

void run(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const Execution& execution) {
  const sm80::ForcedRows forced(kRows);
  sm80::run_forward(problem, grouping, tensors, execution);
}

constexpr ForwardKernel kKernels[] = {{"sm80/forward, 128 rows", Device::cuda, supports, workspace_bytes, run}};

}  // namespace

std::span<const ForwardKernel> long_tiles() { return kKernels; }

}  // namespace distr::test
