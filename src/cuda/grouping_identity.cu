// SPDX-License-Identifier: Apache-2.0
// The order of exact attention: order[row, c] = c. No kernel reads it, but make_grouping() promises it.
//
// A thread block writes 32 rows. Each of its 8 warps writes one row after another, and a lane of it every 32nd column.
// The kernel has no shared memory.
#include <array>

#include "common/element.h"
#include "cuda/grouping.h"
#include "cuda/launch.h"

namespace distr::cuda::identity {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 32;  // of a thread block

__global__ void __launch_bounds__(kThreads) write_identity(std::int64_t rows, int head_dim, std::int32_t* order) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows;
  for (unsigned int i = threadIdx.x / 32; i < kRows && first + i < rows; i += kThreads / 32) {
    for (auto c = static_cast<int>(threadIdx.x % 32); c < head_dim; c += 32) {
      order[(first + i) * head_dim + c] = c;
    }
  }
}

double grid_of(const Problem& problem, const Grouping& grouping) {
  const std::array<std::int64_t, 4> shape = order_shape(problem, grouping);
  // As double: int64 could overflow.
  return static_cast<double>(shape[0]) * static_cast<double>(shape[1]) * static_cast<double>(shape[2]) / kRows;
}

}  // namespace

std::string supports(const Problem& problem, const Grouping& grouping) {
  if (!is_exact(grouping)) {
    return "serves exact problems only: the strategy exact, or groups of one column";
  }
  return grid_of(problem, grouping) > 2147483647.0 ? "the grid would have more than 2147483647 blocks of 32 rows" : "";
}

KernelPlan<GroupingTensors> plan(const Problem& problem, const Grouping& grouping, const Execution& /*execution*/) {
  const std::array<std::int64_t, 4> shape = order_shape(problem, grouping);
  const std::int64_t rows = shape[0] * shape[1] * shape[2];
  const std::int64_t blocks = common::ceil_div(rows, kRows);
  KernelPlan<GroupingTensors> result;
  result.tiles = {{kRows, 0, problem.head_dim, problem.head_dim}};
  result.launches = {{result.tiles.front(), blocks, kThreads, 0}};
  result.run = [rows, blocks, head_dim = static_cast<int>(problem.head_dim)](const GroupingTensors& tensors,
                                                                             const Execution& execution) {
    if (blocks > 0) {
      launch(write_identity, dim3(static_cast<unsigned>(blocks)), kThreads, 0, execution.stream, rows, head_dim,
             tensors.order);
    }
  };
  return result;
}

}  // namespace distr::cuda::identity
