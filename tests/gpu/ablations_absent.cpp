// SPDX-License-Identifier: Apache-2.0
// In the place of the ablations where they are not built (DISTR_ABLATIONS).
#include "gpu/ablations.h"

namespace distr::test {

std::optional<GroupingKernel> reading_ablation(const GroupingKernel& /*kernel*/) { return {}; }
std::optional<GroupingKernel> launching_ablation(const GroupingKernel& /*kernel*/) { return {}; }
std::vector<ForwardAblation> forward_ablations(const ForwardKernel& /*kernel*/) { return {}; }

}  // namespace distr::test
