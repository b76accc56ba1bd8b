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

const BackwardKernel& backward(std::string_view name) {
  const auto kernels = cuda_backend().backward;
  return *std::ranges::find_if(kernels, [&](const BackwardKernel& kernel) { return kernel.name == name; });
}

// The rows of the tiles of sums, if the kernel has some and does not take them by itself; else 0.
std::int64_t rows_of_sums(const Problem& problem, const Grouping& grouping) {
  const auto rows = [&](const char* name) { return backward(name).plan(problem, grouping, {}).tiles; };
  const std::vector<TileShape> tiles = rows("sm80/backward_atomics");
  return tiles.size() == 2 && tiles.front() == rows("sm80/backward").front() ? tiles.back().rows : 0;
}

KernelPlan<BackwardTensors> plan_sums(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  Execution with = execution;
  with.tile_rows = rows_of_sums(problem, grouping);
  return backward("sm80/backward_atomics").plan(problem, grouping, with);
}

std::string supports_sums(const Problem& problem, const Grouping& grouping) {
  const std::string reason = backward("sm80/backward_atomics").supports(problem, grouping);
  return reason.empty() && rows_of_sums(problem, grouping) == 0 ? "has no other tiles" : reason;
}

}  // namespace

std::span<const ForwardKernel> forced_tiles() { return kKernels; }

std::span<const BackwardKernel> backward_kernels() {
  static const std::vector<BackwardKernel> kernels = [] {
    const auto all = cuda_backend().backward;
    std::vector<BackwardKernel> result(all.begin(), all.end());
    result.push_back({"sm80/backward_atomics, sums", Device::cuda, supports_sums, plan_sums, false});
    return result;
  }();
  return kernels;
}

}  // namespace distr::test
