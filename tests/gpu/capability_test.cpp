// SPDX-License-Identifier: Apache-2.0
// Which devices a build's kernels run on; needs no GPU.
#include "cuda/capability.h"

#include <gtest/gtest.h>

namespace distr::cuda {
namespace {

TEST(RunsOn, MachineCodeServesLaterMinorVersionsOfItsMajorVersion) {
  EXPECT_TRUE(runs_on(80, {80}, {}));
  EXPECT_TRUE(runs_on(89, {80}, {}));
  EXPECT_TRUE(runs_on(90, {80, 90}, {}));
  EXPECT_FALSE(runs_on(80, {86}, {}));
  EXPECT_FALSE(runs_on(90, {80, 86}, {}));
  EXPECT_FALSE(runs_on(80, {90}, {}));
}

TEST(RunsOn, PtxServesEveryLaterDevice) {
  EXPECT_TRUE(runs_on(90, {}, {90}));
  EXPECT_TRUE(runs_on(120, {80}, {90}));
  EXPECT_FALSE(runs_on(86, {90}, {90}));
}

}  // namespace
}  // namespace distr::cuda
