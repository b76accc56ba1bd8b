// SPDX-License-Identifier: Apache-2.0
#include "distr/measure.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/oracle.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

Case small(Strategy strategy) {
  Case result;
  result.name = "measured";
  result.problem.heads_q = 2;
  result.problem.seq_q = 40;
  result.problem.seq_k = 30;
  result.problem.head_dim = 8;
  result.problem.head_dim_v = 8;
  result.problem = contiguous(result.problem);
  result.grouping.strategy = strategy;
  result.grouping.block = 16;
  return result;
}

Buffer exact_output(Instance& instance) {
  Buffer o = instance.output();
  Buffer lse = instance.lse_output();
  Grouping exact;
  exact.strategy = Strategy::exact;
  forward(instance.test_case.problem, exact, instance.forward_into(o, lse));
  return o;
}

TEST(Measure, ExactAttentionHasNoError) {
  Instance instance(small(Strategy::exact));
  const Buffer exact = exact_output(instance);
  forward(instance.test_case.problem, instance.test_case.grouping, instance.forward());
  const Errors errors =
      measure(instance.test_case.problem, instance.test_case.grouping, instance.forward(), exact.data());
  EXPECT_EQ(errors.output_frobenius, 0);
  EXPECT_NEAR(errors.row_cosine_min, 1, 1e-12);
  EXPECT_EQ(errors.total_variation, 0);
  EXPECT_EQ(errors.score_elementwise, 0);
  EXPECT_EQ(errors.score_signed, 0);
  EXPECT_EQ(errors.rows, 80);
}

// The same statistics by hand, from the textbook's P and S of one query and one key dimension.
TEST(Measure, AgreesWithAHandComputation) {
  Case test_case = small(Strategy::energy);
  Problem& p = test_case.problem;
  p.heads_q = p.heads_kv = p.seq_q = 1;
  p.seq_k = 2;
  p.head_dim = 2;
  p.head_dim_v = 1;
  p.scale = 1;
  p = contiguous(p);
  Instance instance(test_case);
  // Column 0 weighs 4 * 8 = 32, column 1 1 * 2 = 2: column 1 is dropped.
  const double q[] = {2, 1};
  const double k[] = {0, 1, 4, 3};
  for (std::int64_t n = 0; n < 2; ++n) {
    instance.q.set(n, q[n]);
    instance.v.set(n, n == 0 ? 1 : 3);
  }
  for (std::int64_t n = 0; n < 4; ++n) {
    instance.k.set(n, k[n]);
  }
  make_grouping(p, test_case.grouping, {instance.q_data(), instance.k_data(), instance.order.data()});
  ASSERT_EQ(instance.order, (std::vector<std::int32_t>{0, 1}));
  const Buffer exact = exact_output(instance);
  forward(p, test_case.grouping, instance.forward());
  const Errors errors = measure(p, test_case.grouping, instance.forward(), exact.data());
  // S = [1, 11], S_hat = [0, 8].
  const double p_exact = 1 / (1 + std::exp(10));
  const double p_hat = 1 / (1 + std::exp(8));
  EXPECT_NEAR(errors.total_variation, p_hat - p_exact, 1e-12);
  EXPECT_NEAR(errors.score_elementwise, (1 + 3) / 12.0, 1e-12);
  EXPECT_NEAR(errors.score_signed, 4 / 12.0, 1e-12);
  const double o_exact = 3 - 2 * p_exact;
  EXPECT_NEAR(errors.output_frobenius, 2 * (p_hat - p_exact) / o_exact, 1e-6);
  EXPECT_EQ(errors.rows, 1);
}

TEST(Measure, LooksAtNoMoreRowsThanAsked) {
  Instance instance(small(Strategy::lsh));
  const Buffer exact = exact_output(instance);
  forward(instance.test_case.problem, instance.test_case.grouping, instance.forward());
  const Errors all = measure(instance.test_case.problem, instance.test_case.grouping, instance.forward(), exact.data());
  const Errors some =
      measure(instance.test_case.problem, instance.test_case.grouping, instance.forward(), exact.data(), 20);
  EXPECT_EQ(some.rows, 20);
  EXPECT_EQ(some.output_frobenius, all.output_frobenius);  // over all of O
  EXPECT_NEAR(some.total_variation, all.total_variation, 0.3 * all.total_variation);
}

TEST(Measure, RefusesWhatForwardRefuses) {
  Instance instance(small(Strategy::lsh));
  const auto status = [&](const Problem& problem, const ForwardTensors& tensors) {
    try {
      static_cast<void>(measure(problem, instance.test_case.grouping, tensors, instance.o.data()));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  Problem masked = instance.test_case.problem;
  masked.mask.kind = MaskKind::boolean;
  ForwardTensors tensors = instance.forward();
  tensors.mask = nullptr;
  EXPECT_EQ(status(masked, tensors), "the mask is null; allowed: memory of the problem's sizes");
  instance.order[3] = 1 << 30;
  EXPECT_EQ(status(instance.test_case.problem, instance.forward()).rfind("row 0 of the order is no permutation", 0),
            0U);
}

// A mask's bias is in both kinds of scores, and must not make their error look small.
TEST(Measure, ScoresAreThoseWithoutTheMask) {
  Case test_case = small(Strategy::lsh);
  const auto elementwise = [](Instance& instance) {
    const Buffer exact = exact_output(instance);
    forward(instance.test_case.problem, instance.test_case.grouping, instance.forward());
    return measure(instance.test_case.problem, instance.test_case.grouping, instance.forward(), exact.data())
        .score_elementwise;
  };
  Instance plain(test_case);
  test_case.problem.mask = {MaskKind::additive, DType::f32, 1, {30}, {1}};
  Instance masked(test_case);
  for (std::int64_t j = 0; j < 30; ++j) {
    masked.mask.set(j, -1e4);
  }
  EXPECT_NEAR(elementwise(masked), elementwise(plain), 1e-9);
}

TEST(Measure, ARowThatVanishedHasCosineZero) {
  Instance instance(small(Strategy::lsh));
  const Buffer exact = exact_output(instance);
  for (std::int64_t n = 0; n < instance.o.count(); ++n) {
    instance.o.set(n, 0);
  }
  const auto measured = [&] {
    return measure(instance.test_case.problem, instance.test_case.grouping, instance.forward(), exact.data());
  };
  EXPECT_EQ(measured().row_cosine_min, 0);
  instance.o.set(5, NAN);
  EXPECT_TRUE(std::isnan(measured().row_cosine_min));
}

TEST(Probabilities, RowsSumToOneAndLargeMatricesShrink) {
  Instance instance(small(Strategy::lsh));
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  const auto full = probabilities(instance.test_case.problem, instance.test_case.grouping, instance.forward(), 0, 1,
                                  100, rows, columns);
  ASSERT_EQ(rows, 40);
  ASSERT_EQ(columns, 30);
  for (std::size_t i = 0; i < 40; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < 30; ++j) {
      sum += full[i * 30 + j];
    }
    EXPECT_NEAR(sum, 1, 1e-12);
  }
  const auto half = probabilities(instance.test_case.problem, instance.test_case.grouping, instance.forward(), 0, 1, 10,
                                  rows, columns);
  ASSERT_EQ(rows, 10);
  ASSERT_EQ(columns, 10);
  double block = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < 3; ++j) {
      block += full[i * 30 + j] / 12;
    }
  }
  EXPECT_NEAR(half[0], block, 1e-12);
  EXPECT_THROW(static_cast<void>(probabilities(instance.test_case.problem, instance.test_case.grouping,
                                               instance.forward(), 0, 2, 10, rows, columns)),
               Error);
}

}  // namespace
}  // namespace distr
