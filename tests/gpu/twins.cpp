// SPDX-License-Identifier: Apache-2.0
#include "gpu/twins.h"

#include "cuda/grouping.h"

namespace distr::test {

std::optional<GroupingKernel> reading_twin(const GroupingKernel& kernel) {
  GroupingKernel twin = kernel;
  const std::string name = kernel.name;
  if (name == "cuda/lsh") {
    twin.plan = cuda::lsh::plan_read_only;
  } else if (name == "cuda/energy") {
    twin.plan = cuda::energy::plan_read_only;
  } else {
    return std::nullopt;
  }
  return twin;
}

std::optional<GroupingKernel> launching_twin(const GroupingKernel& kernel) {
  if (kernel.name != std::string("cuda/energy")) {
    return std::nullopt;
  }
  GroupingKernel twin = kernel;
  twin.plan = cuda::energy::plan_read_and_wait;
  return twin;
}

}  // namespace distr::test
