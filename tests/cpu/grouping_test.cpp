// SPDX-License-Identifier: Apache-2.0
// The CPU's orders against the reference's.
#include <gtest/gtest.h>

#include <cmath>

#include "support/cases.h"
#include "support/check_order.h"

namespace distr {
namespace {

using test::Case;
using test::Instance;

TEST(CpuGrouping, IsTheReferencesUpToRounding) {
  for (const Case& test_case : test::cases()) {
    if (is_exact(test_case.grouping) || !test::makes_order(test_case.grouping)) {
      continue;
    }
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      SCOPED_TRACE(test_case.name + ", " + test::name_of(dtype));
      Instance instance(test::with_dtype(test_case, dtype));
      std::vector<std::int32_t> order(instance.order.size(), -1);
      make_grouping(instance.test_case.problem, test_case.grouping,
                    {instance.q_data(), instance.k_data(), order.data()});
      EXPECT_EQ(test::check_order(instance, order.data()), "");
    }
  }
}

TEST(CpuGrouping, HasTheSameBitsForAnyNumberOfThreads) {
  for (const Case& test_case : test::cases()) {
    if (!test::makes_order(test_case.grouping)) {
      continue;
    }
    const Instance instance(test::with_dtype(test_case, DType::f32));
    std::vector<std::int32_t> one(instance.order.size());
    std::vector<std::int32_t> three(instance.order.size());
    Execution execution;
    execution.threads = 1;
    make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), one.data()}, execution);
    execution.threads = 3;
    make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), three.data()},
                  execution);
    EXPECT_EQ(one, three) << test_case.name;
  }
}

// A large mean must not drown the spread around it: the sums are taken about the mean.
TEST(CpuGrouping, EnergySurvivesALargeMean) {
  Case test_case;
  test_case.name = "large mean";
  test_case.problem.seq_q = 16;
  test_case.problem.seq_k = 1000;
  test_case.problem.head_dim = test_case.problem.head_dim_v = 8;
  test_case.problem = contiguous(test_case.problem);
  test_case.grouping.strategy = Strategy::energy;
  Instance instance(test_case);
  for (std::int64_t n = 0; n < instance.k.count(); ++n) {
    const auto column = static_cast<double>(n % 8);
    instance.k.set(n, 1000 + instance.k.at(n) * (1 + column));
  }
  for (std::int64_t n = 0; n < instance.q.count(); ++n) {
    instance.q.set(n, 1);
  }
  make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), instance.order.data()});
  EXPECT_EQ(instance.order, (std::vector<std::int32_t>{7, 6, 5, 4, 3, 2, 1, 0}));
}

TEST(CpuGrouping, NanAndInfiniteEnergiesComeFirst) {
  Case test_case;
  test_case.name = "not finite";
  test_case.problem.seq_q = test_case.problem.seq_k = 20;
  test_case.problem.head_dim = test_case.problem.head_dim_v = 6;
  test_case.problem = contiguous(test_case.problem);
  test_case.grouping.strategy = Strategy::energy;
  Instance instance(test_case);
  instance.q.set(6 + 3, std::nan(""));
  instance.k.set(12 + 5, INFINITY);
  make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), instance.order.data()});
  EXPECT_EQ(instance.order[0], 3);
  EXPECT_EQ(instance.order[1], 5);
}

}  // namespace
}  // namespace distr
