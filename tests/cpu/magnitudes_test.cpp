// SPDX-License-Identifier: Apache-2.0
// Scores from 1e-30 to 1e30.
#include <gtest/gtest.h>

#include <hwy/highway.h>

#include "support/magnitudes.h"
#include "support/oracle.h"
#include "support/types_of_case.h"

namespace distr {
namespace {

using test::Instance;

constexpr const char* kCases[] = {"odd sizes",    "causal top-left, more keys", "additive mask",
                                  "boolean mask", "lsh, short last group",      "energy, one column",
                                  "near, given",  "sliding window, GQA",        "softcap"};

TEST(Magnitudes, SoftmaxIsRightForEveryFiniteScore) {
  constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    for (const char* name : kCases) {
      for (const DType dtype : test::types_of_case(0, kTypes)) {
        for (Instance& instance : test::magnified(test::with_dtype(test::find(name), dtype))) {
          EXPECT_EQ(test::check_forward(forward, instance), "")
              << instance.test_case.name << ", " << test::name_of(dtype) << ", " << hwy::TargetName(target);
        }
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

TEST(Magnitudes, GradientsAreThoseOfTheKeysThatTheForwardTook) {
  for (const char* name : kCases) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (Instance& instance : test::magnified(test::with_dtype(test::find(name), dtype), test::Use::backward)) {
        EXPECT_EQ(test::check_own_backward(forward, backward, instance), "")
            << instance.test_case.name << ", " << test::name_of(dtype);
      }
    }
  }
}

}  // namespace
}  // namespace distr
