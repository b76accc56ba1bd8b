// SPDX-License-Identifier: Apache-2.0
// A softcap as the tensor-core kernels take it: scores become cap * tanh(score / cap), in the units of q k^T.
#pragma once

#include <algorithm>
#include <limits>

#include "distr/problem.h"

namespace distr::cuda {

// Of scores up to half of the cap, as nearly all of models are, tanh(x) / x is a polynomial in x^2 (that of least
// largest relative error, 6e-7). Its coefficients are those of the score's square here: they hold the cap.
struct ScoreCap {
  float cap, inverse;  // softcap / scale; 0: scores are not capped
  float small;         // cap / 2
  float factor[4];     // of a small score, and the same times scale * log2(e)
  float factor_log2[4];
};

[[nodiscard]] inline ScoreCap score_cap_of(const Problem& problem) noexcept {
  if (problem.softcap == 0) {
    return {};
  }
  constexpr double kTanh[] = {0.99999946, -0.33326319, 0.13190296, -0.044402227};
  constexpr double kLog2E = 1.4426950408889634;
  using Limits = std::numeric_limits<float>;
  const double cap = std::clamp<double>(problem.softcap / problem.softmax_scale(), Limits::min(), Limits::max());
  ScoreCap result{static_cast<float>(cap), static_cast<float>(1 / cap), static_cast<float>(cap / 2), {}, {}};
  // Of a tiny cap they leave fp32's range, and a score of 0 times infinity would be NaN.
  const auto finite = [](double x) {
    return static_cast<float>(std::clamp<double>(x, Limits::lowest(), Limits::max()));
  };
  double power = 1;
  for (int i = 0; i < 4; ++i) {
    result.factor[i] = finite(kTanh[i] * power);
    result.factor_log2[i] = finite(kTanh[i] * power * problem.softmax_scale() * kLog2E);
    power /= cap * cap;
  }
  return result;
}

}  // namespace distr::cuda
