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

// With tiles of so many rows where the kernel has some.
KernelPlan<BackwardTensors> plan_sums(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  constexpr std::int64_t kSumRows = 64;
  const auto kernels = cuda_backend().backward;
  const auto& atomics = *std::find_if(kernels.begin(), kernels.end(), [](const BackwardKernel& kernel) {
    return kernel.name == std::string_view("sm80/backward_atomics");
  });
  KernelPlan<BackwardTensors> own = atomics.plan(problem, grouping, execution);
  const bool has_sums = std::ranges::any_of(own.tiles, [](const TileShape& tile) { return tile.rows == kSumRows; });
  if (own.tiles.size() < 2 || !has_sums) {
    return own;
  }
  Execution with = execution;
  with.tile_rows = kSumRows;
  return atomics.plan(problem, grouping, with);
}

}  // namespace

std::span<const ForwardKernel> forced_tiles() { return kKernels; }

std::span<const BackwardKernel> backward_kernels() {
  static const std::vector<BackwardKernel> kernels = [] {
    const auto all = cuda_backend().backward;
    std::vector<BackwardKernel> result(all.begin(), all.end());
    for (BackwardKernel& kernel : result) {
      kernel.plan = kernel.name == std::string_view("sm80/backward_atomics") ? plan_sums : kernel.plan;
    }
    return result;
  }();
  return kernels;
}

}  // namespace distr::test
