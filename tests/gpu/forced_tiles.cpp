// SPDX-License-Identifier: Apache-2.0
#include "gpu/forced_tiles.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace distr::test {
namespace {

constexpr std::int64_t kRows = 128;

const ForwardKernel& portable() {
  const auto kernels = cuda_backend().forward;
  return *std::find_if(kernels.begin(), kernels.end(),
                       [](const ForwardKernel& kernel) { return kernel.name == std::string_view("sm80/forward"); });
}

KernelPlan<ForwardTensors> plan(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  Execution with = execution;
  with.tile_rows = kRows;
  return portable().plan(problem, grouping, with);
}

std::string supports(const Problem& problem, const Grouping& grouping) {
  const std::string reason = portable().supports(problem, grouping);
  if (!reason.empty()) {
    return reason;
  }
  const std::vector<TileShape> tiles = plan(problem, grouping, {}).tiles;
  return !tiles.empty() && tiles.front().rows == kRows ? "" : "has no tiles of 128 queries";
}

constexpr ForwardKernel kKernels[] = {{"sm80/forward, 128 rows", Device::cuda, supports, plan}};

}  // namespace

std::span<const ForwardKernel> forced_tiles() { return kKernels; }

}  // namespace distr::test
