// SPDX-License-Identifier: Apache-2.0
#include "gpu/ablations.h"

#include "cuda/grouping.h"

namespace distr::test {

std::optional<GroupingKernel> reading_ablation(const GroupingKernel& kernel) {
  GroupingKernel ablation = kernel;
  const std::string name = kernel.name;
  if (name == "cuda/lsh") {
    ablation.plan = cuda::lsh::plan_read_only;
  } else if (name == "cuda/energy") {
    ablation.plan = cuda::energy::plan_read_only;
  } else {
    return std::nullopt;
  }
  return ablation;
}

std::optional<GroupingKernel> launching_ablation(const GroupingKernel& kernel) {
  if (kernel.name != std::string("cuda/energy")) {
    return std::nullopt;
  }
  GroupingKernel ablation = kernel;
  ablation.plan = cuda::energy::plan_read_and_wait;
  return ablation;
}

}  // namespace distr::test
