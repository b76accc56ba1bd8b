// SPDX-License-Identifier: Apache-2.0
// Twins of a kernel that leave one of its stages out. What they compute is wrong; their times beside the kernel's own
// say where a miss comes from. The library has none of them (tests/gpu/forward_twins.cu).
#pragma once

namespace distr::cuda {

enum class Without {
  nothing,      // the kernel itself
  exponential,  // P is the exponent
  fusion,       // columns of K are copied, but never summed; on Hopper no tile of k_hat is made
  values,       // V is neither copied nor multiplied
};

}  // namespace distr::cuda
