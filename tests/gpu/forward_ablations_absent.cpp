// SPDX-License-Identifier: Apache-2.0
// In the place of the ablations of the forward kernels where they are not built (DISTR_ABLATIONS).
#include "gpu/ablations.h"

namespace distr::test {

std::vector<ForwardAblation> forward_ablations(const ForwardKernel& /*kernel*/) { return {}; }

}  // namespace distr::test
