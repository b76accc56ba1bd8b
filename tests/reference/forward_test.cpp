// SPDX-License-Identifier: Apache-2.0
// The reference's forward against textbook attention.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernel.h"
#include "support/oracle.h"
#include "support/types_of_case.h"

namespace distr {
namespace {

void reference_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                       const Execution& /*execution*/) {
  Execution execution;
  execution.threads = 2;
  reference_backend().forward[0].plan(problem, grouping, execution).run(tensors, execution);
}

TEST(ReferenceForward, IsTheTextbookOnEveryCase) {
  constexpr DType kTypes[] = {DType::f64, DType::bf16};
  for (std::size_t n = 0; n < test::cases().size(); ++n) {
    const test::Case& test_case = test::cases()[n];
    for (const DType dtype : test::types_of_case(n, kTypes)) {
      test::Instance instance(test::with_dtype(test_case, dtype));
      EXPECT_EQ(test::check_forward(reference_forward, instance), "") << test_case.name << ", " << test::name_of(dtype);
    }
  }
}

TEST(ReferenceForward, GroupSizeOneIsExactBitForBit) {
  for (const test::Case& original : test::cases()) {
    test::Case test_case = test::with_dtype(original, DType::f64);
    test_case.grouping.group_size = 1;
    test::Instance grouped(test_case);
    test_case.grouping.strategy = Strategy::exact;
    test_case.grouping.block = 7;
    test::Instance exact(test_case);
    forward(test_case.problem, grouped.test_case.grouping, grouped.forward());
    forward(test_case.problem, test_case.grouping, exact.forward());
    EXPECT_TRUE(grouped.o == exact.o && grouped.lse == exact.lse) << test_case.name;
  }
}

// Columns of Q that come in equal pairs lose nothing: the estimate is every member (Equation 1).
TEST(ReferenceForward, EqualColumnsLoseNothing) {
  test::Case test_case;
  test_case.name = "equal pairs";
  test_case.problem.seq_q = test_case.problem.seq_k = 48;
  test_case.problem.head_dim = test_case.problem.head_dim_v = 8;
  test_case.problem = contiguous(test_case.problem);
  test_case = test::with_dtype(test_case, DType::f64);
  test_case.grouping.strategy = Strategy::lsh;
  test_case.grouping.block = 16;
  test::Instance instance(test_case);
  for (std::int64_t i = 0; i < 48; ++i) {
    for (std::int64_t c = 0; c < 4; ++c) {
      instance.q.set(i * 8 + c + 4, instance.q.at(i * 8 + c));
    }
  }
  make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), instance.order.data()});
  for (const Estimator estimator : {Estimator::sample, Estimator::mean}) {
    Grouping grouping = test_case.grouping;
    grouping.estimator = estimator;
    forward(test_case.problem, grouping, instance.forward());
    test::Buffer exact = instance.output();
    test::Buffer lse = instance.lse_output();
    Grouping none;
    none.strategy = Strategy::exact;
    forward(test_case.problem, none, instance.forward_into(exact, lse));
    for (std::int64_t index = 0; index < exact.count(); ++index) {
      ASSERT_NEAR(instance.o.at(index), exact.at(index), 1e-12) << "index " << index;
    }
  }
}

}  // namespace
}  // namespace distr
