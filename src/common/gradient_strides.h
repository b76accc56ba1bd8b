// SPDX-License-Identifier: Apache-2.0
// How dQ, dK and dV lie in memory.
#pragma once

#include "distr/problem.h"

namespace distr::common {

struct GradientStrides {
  Strides q, k, v;
};

[[nodiscard]] inline GradientStrides gradient_strides(const Problem& problem) noexcept {
  return {problem.d_q.value_or(problem.q), problem.d_k.value_or(problem.k), problem.d_v.value_or(problem.v)};
}

}  // namespace distr::common
