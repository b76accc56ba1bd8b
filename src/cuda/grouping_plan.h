// SPDX-License-Identifier: Apache-2.0
// What the grouping kernels hand to the library.
#pragma once

#include "kernel.h"

namespace distr::cuda::grouping {

// The KernelPlan of a Plan, what a call does, and of `run`, which does it. Plan has of(problem, grouping, workspace),
// launches(), and `arguments`, whose queries are counted.
template <class Plan>
[[nodiscard]] KernelPlan<GroupingTensors> kernel_plan(const Problem& problem, const Grouping& grouping,
                                                      void (*run)(const Plan& plan, const GroupingTensors& tensors,
                                                                  const Execution& execution)) {
  KernelPlan<GroupingTensors> result;
  const Plan plan = Plan::of(problem, grouping, result.workspace);
  result.launches = plan.launches();
  result.tiles = {result.launches.front().tile};
  result.run = [plan, run](const GroupingTensors& tensors, const Execution& execution) {
    if (plan.arguments.queries.count > 0) {
      run(plan, tensors, execution);
    }
  };
  return result;
}

}  // namespace distr::cuda::grouping
