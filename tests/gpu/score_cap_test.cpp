// SPDX-License-Identifier: Apache-2.0
// A cap on scores as the tensor-core kernels take it, which needs no GPU.
#include "cuda/score_cap.h"

#include <gtest/gtest.h>

#include <cmath>

namespace distr::cuda {
namespace {

TEST(ScoreCap, IsFiniteForEveryCapThatIsAllowed) {
  Problem problem;
  problem.head_dim = 64;
  for (const double softcap : {1.2e-38, 1e-20, 1e-9, 1.0, 1e20, 3.4e38}) {
    problem.softcap = softcap;
    const ScoreCap cap = score_cap_of(problem);
    for (int i = 0; i < 4; ++i) {  // times a score of 0
      EXPECT_TRUE(std::isfinite(cap.factor[i])) << softcap << ", " << i;
      EXPECT_TRUE(std::isfinite(cap.factor_log2[i])) << softcap << ", " << i;
    }
  }
}

}  // namespace
}  // namespace distr::cuda
