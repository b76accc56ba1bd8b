// SPDX-License-Identifier: Apache-2.0
// A softcap as the tensor-core kernels take it.
#pragma once

#include <algorithm>
#include <limits>

#include "distr/problem.h"

namespace distr::cuda {

// The cap of scores before their scale, softcap / scale; 0: there is none.
struct ScoreCap {
  float cap, inverse;
};

[[nodiscard]] inline ScoreCap score_cap_of(const Problem& problem) noexcept {
  if (problem.softcap == 0) {
    return {0, 0};
  }
  using Limits = std::numeric_limits<float>;
  const double cap = std::clamp<double>(problem.softcap / problem.softmax_scale(), Limits::min(), Limits::max());
  return {static_cast<float>(cap), static_cast<float>(1 / cap)};
}

}  // namespace distr::cuda
