// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "reference/head.h"

namespace distr {
namespace reference {
namespace {

std::string supports(const Problem& /*problem*/, const Grouping& /*grouping*/) { return {}; }

template <auto kRun, class Tensors>
KernelPlan<Tensors> plan(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  const TileShape tile{problem.seq_q, problem.seq_k, problem.head_dim,
                       is_exact(grouping) ? problem.head_dim : num_groups(problem, grouping)};
  return {
      WorkspaceLayout(),
      {{tile, problem.batch * problem.heads_q, execution.threads, 0}},
      {tile},
      [&problem, &grouping](const Tensors& tensors, const Execution& with) { kRun(problem, grouping, tensors, with); }};
}

constexpr std::array<GroupingKernel, 1> kGrouping{
    {{"reference/grouping", Device::cpu, supports, plan<run_grouping, GroupingTensors>}}};
constexpr std::array<ForwardKernel, 1> kForward{
    {{"reference/forward", Device::cpu, supports, plan<run_forward, ForwardTensors>}}};
constexpr std::array<BackwardKernel, 1> kBackward{
    {{"reference/backward", Device::cpu, supports, plan<run_backward, BackwardTensors>}}};

}  // namespace
}  // namespace reference

Backend reference_backend() { return {reference::kGrouping, reference::kForward, reference::kBackward}; }

}  // namespace distr
