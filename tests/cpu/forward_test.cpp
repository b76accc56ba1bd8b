// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <hwy/highway.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernel_name.h"
#include "kernel.h"
#include "support/oracle.h"
#include "support/types_of_case.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16};

TEST(CpuForward, IsWithinToleranceOnEveryCase) {
  for (std::size_t n = 0; n < test::cases().size(); ++n) {
    const Case& test_case = test::cases()[n];
    for (const DType dtype : test::types_of_case(n, kDTypes)) {
      Instance instance(test::with_dtype(test_case, dtype));
      EXPECT_EQ(explain(Operation::forward, instance.test_case.problem, test_case.grouping).kernel,
                test::cpu_kernel(Operation::forward, dtype));
      EXPECT_EQ(test::check_forward(forward, instance), "") << test_case.name << ", " << test::name_of(dtype);
    }
  }
}

// A row's bits do not depend on how many rows its task has.
TEST(CpuForward, HasTheSameBitsForTasksOfMoreRows) {
  std::vector<Case> cases(test::cases().begin(), test::cases().end());
  cases.insert(cases.end(), test::near_cases().begin(), test::near_cases().end());
  Case& shared_keys = cases.emplace_back(test::square(300, 8, Causal::none, {}));
  shared_keys.name = "tasks share keys";
  shared_keys.problem.seq_k = 4500;
  shared_keys.problem = contiguous(shared_keys.problem);
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const Case& test_case = cases[n];
    Instance instance(test::with_dtype(test_case, kDTypes[n % std::size(kDTypes)]));
    Execution execution;
    execution.tile_rows = 128;
    forward(instance.test_case.problem, test_case.grouping, instance.forward(), execution);
    Buffer o = instance.output();
    Buffer lse = instance.lse_output();
    execution.tile_rows = 256;
    forward(instance.test_case.problem, test_case.grouping, instance.forward_into(o, lse), execution);
    EXPECT_TRUE(o == instance.o && lse == instance.lse) << test_case.name;
  }
}

TEST(CpuForward, IsWithinToleranceOnFreshValues) {
  for (const std::uint64_t seed : {11U, 12U, 13U}) {
    for (const char* name : {"odd sizes", "lsh, mean", "energy, previous", "additive mask", "heavy tails"}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Instance instance(test::with_dtype(test::find(name), dtype), seed);
        EXPECT_EQ(test::check_forward(forward, instance), "")
            << name << ", " << test::name_of(dtype) << ", seed " << seed;
      }
    }
  }
}

// Every instruction set that this processor has, not only the best.
TEST(CpuForward, IsWithinToleranceOnEveryInstructionSet) {
  const std::int64_t supported = hwy::SupportedTargets();
  for (std::int64_t left = supported; left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    for (const char* name : {"odd sizes", "lsh, short last group", "energy, previous", "GQA", "huge scores"}) {
      for (const DType dtype : {DType::f16, DType::bf16}) {
        Instance instance(test::with_dtype(test::find(name), dtype));
        EXPECT_EQ(test::check_forward(forward, instance), "")
            << name << ", " << test::name_of(dtype) << ", " << hwy::TargetName(target);
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

// Kernels that are wrong in one way each: the suite must catch every one of them.
void forward_less_one_key(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                          const Execution& execution) {
  Problem wrong = problem;
  wrong.seq_k -= 1;
  forward(wrong, grouping, tensors, execution);
}
void forward_at_a_wrong_scale(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                              const Execution& execution) {
  Problem wrong = problem;  // that of the reduced dimension
  wrong.scale = 1 / std::sqrt(static_cast<double>(num_groups(problem, grouping)));
  forward(wrong, grouping, tensors, execution);
}
void forward_at_the_other_corner(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                                 const Execution& execution) {
  Problem wrong = problem;
  wrong.causal = Causal::top_left;
  forward(wrong, grouping, tensors, execution);
}
void forward_with_the_other_estimator(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                                      const Execution& execution) {
  Grouping wrong = grouping;
  wrong.estimator = Estimator::sample;
  forward(problem, wrong, tensors, execution);
}
void forward_with_block_0s_order(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                                 const Execution& execution) {
  std::vector<std::int32_t> order;
  const auto shape = order_shape(problem, grouping);
  for (std::int64_t row = 0; row < shape[0] * shape[1] * shape[2]; ++row) {
    order.insert(order.end(), tensors.order, tensors.order + shape[3]);
  }
  ForwardTensors wrong = tensors;
  wrong.order = order.data();
  forward(problem, grouping, wrong, execution);
}
void forward_without_the_last_row(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                                  const Execution& execution) {
  Problem wrong = problem;
  wrong.seq_q -= 1;
  forward(wrong, grouping, tensors, execution);
}
void forward_with_an_lse_of_base_2(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                                   const Execution& execution) {
  forward(problem, grouping, tensors, execution);
  for (std::int64_t row = 0; row < problem.batch * problem.heads_q * problem.seq_q; ++row) {
    static_cast<float*>(tensors.lse)[row] *= 1.442695F;
  }
}
void forward_that_writes_beside(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                                const Execution& execution) {
  forward(problem, grouping, tensors, execution);
  static_cast<float*>(tensors.o)[-1] = 0;
}

TEST(Suite, CatchesWrongKernels) {
  const std::pair<test::Forward, const char*> wrong_kernels[] = {
      {forward_less_one_key, "odd sizes"},
      {forward_at_a_wrong_scale, "lsh, mean"},
      {forward_at_the_other_corner, "causal bottom-right, more keys"},
      {forward_with_the_other_estimator, "lsh, mean"},
      {forward_with_block_0s_order, "energy"},
      {forward_without_the_last_row, "smallest"},
      {forward_with_an_lse_of_base_2, "odd sizes"},
      {forward_that_writes_beside, "odd sizes"},
  };
  for (const auto& [wrong, name] : wrong_kernels) {
    Instance instance(test::with_dtype(test::find(name), DType::f32));
    EXPECT_NE(test::check_forward(wrong, instance), "") << name;
    Instance again(test::with_dtype(test::find(name), DType::f32));
    EXPECT_EQ(test::check_forward(forward, again), "") << name;
  }
}

TEST(CpuForward, HasTheSameBitsForAnyNumberOfThreads) {
  constexpr int kThreadCounts[] = {2, 3, 7};
  for (const Case& test_case : test::cases()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Instance instance(test::with_dtype(test_case, dtype));
      const Problem& problem = instance.test_case.problem;
      Execution execution;
      execution.threads = 1;
      forward(problem, test_case.grouping, instance.forward(), execution);
      for (const int threads : test::thread_counts(kThreadCounts)) {
        Buffer o = instance.output();
        Buffer lse = instance.lse_output();
        execution.threads = threads;
        forward(problem, test_case.grouping, instance.forward_into(o, lse), execution);
        EXPECT_TRUE(o == instance.o && lse == instance.lse)
            << test_case.name << ", " << test::name_of(dtype) << ", " << threads << " threads";
      }
    }
  }
}

TEST(CpuForward, GroupSizeOneIsExactBitForBit) {
  for (const Case& original : test::cases()) {
    for (const Strategy strategy : {Strategy::lsh, Strategy::energy}) {
      Case test_case = test::with_dtype(original, strategy == Strategy::lsh ? DType::f32 : DType::bf16);
      test_case.grouping.strategy = strategy;
      test_case.grouping.group_size = 1;
      Instance grouped(test_case);
      forward(test_case.problem, test_case.grouping, grouped.forward());
      Buffer o = grouped.output();
      Buffer lse = grouped.lse_output();
      Grouping exact;
      exact.strategy = Strategy::exact;
      exact.group_size = 1;
      forward(test_case.problem, exact, grouped.forward_into(o, lse));
      EXPECT_TRUE(o == grouped.o && lse == grouped.lse) << test_case.name;
    }
  }
}

// Rows up to `last` of O and LSE after make_grouping and forward, with the rows of Q, K and V behind it set to `later`.
std::pair<std::vector<double>, std::vector<double>> rows_up_to(const Case& test_case, std::int64_t last, double later) {
  Instance instance(test_case);
  const Problem& p = test_case.problem;
  for (Buffer* buffer : {&instance.q, &instance.k, &instance.v}) {
    for (std::int64_t n = (last + 1) * p.head_dim; n < buffer->count(); ++n) {
      buffer->set(n, later);
    }
  }
  make_grouping(p, test_case.grouping, {instance.q_data(), instance.k_data(), instance.order.data()});
  forward(p, test_case.grouping, instance.forward());
  test::Result result = test::written(p, instance.o, instance.lse);
  result.o.resize(static_cast<std::size_t>((last + 1) * p.head_dim_v));
  result.lse.resize(static_cast<std::size_t>(last + 1));
  return {result.o, result.lse};
}

TEST(CpuForward, CausalWithPreviousNeverSeesTheFuture) {
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh, Strategy::energy}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
      Case test_case;
      test_case.problem.seq_q = test_case.problem.seq_k = 200;
      test_case.problem.head_dim = test_case.problem.head_dim_v = 16;
      test_case.problem = contiguous(test_case.problem);
      test_case.problem.causal = Causal::top_left;
      test_case.grouping.strategy = strategy;
      test_case.grouping.block = 48;
      test_case.grouping.order_from = OrderFrom::previous;
      test_case = test::with_dtype(test_case, dtype);
      for (const std::int64_t last : {0, 47, 48, 60, 95, 96, 150}) {
        const auto before = rows_up_to(test_case, last, 0.25);
        EXPECT_EQ(before, rows_up_to(test_case, last, -40)) << "rows up to " << last;
        EXPECT_EQ(before, rows_up_to(test_case, last, std::numeric_limits<double>::quiet_NaN())) << "NaN, " << last;
        EXPECT_EQ(before, rows_up_to(test_case, last, std::numeric_limits<double>::infinity())) << "inf, " << last;
      }
    }
  }
}

// `own` does see it: without this, the test above could not fail.
TEST(CpuForward, CausalWithOwnSeesTheFuture) {
  Case test_case;
  test_case.problem.seq_q = test_case.problem.seq_k = 96;
  test_case.problem.head_dim = test_case.problem.head_dim_v = 16;
  test_case.problem = contiguous(test_case.problem);
  test_case.problem.causal = Causal::top_left;
  test_case.grouping.strategy = Strategy::energy;
  test_case.grouping.block = 48;
  EXPECT_NE(rows_up_to(test_case, 60, 0.25), rows_up_to(test_case, 60, -40));
}

TEST(CpuForward, LseIsOptional) {
  Instance instance(test::with_dtype(test::find("GQA"), DType::f32));
  forward(instance.test_case.problem, instance.test_case.grouping, instance.forward());
  ForwardTensors tensors = instance.forward();
  Buffer o = instance.output();
  tensors.o = o.data();
  tensors.lse = nullptr;
  forward(instance.test_case.problem, instance.test_case.grouping, tensors);
  EXPECT_TRUE(o == instance.o);
}

}  // namespace
}  // namespace distr
