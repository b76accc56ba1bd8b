// SPDX-License-Identifier: Apache-2.0
// Near keys and skipped halves of tiles (method, 8) on the CPU.
#include <gtest/gtest.h>

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/kernel_name.h"
#include "kernel.h"
#include "support/oracle.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

// Every case in f32 and bf16, whose products differ, and every fourth in f16, which loads and stores alone tell apart.
std::vector<Case> typed_cases() {
  std::vector<Case> result;
  for (const Case& test_case : test::near_cases()) {
    result.push_back(test::with_dtype(test_case, DType::f32));
    result.push_back(test::with_dtype(test_case, DType::bf16));
    if (result.size() % 4 == 1) {
      result.push_back(test::with_dtype(test_case, DType::f16));
    }
  }
  return result;
}

void group(Instance& instance, const Execution& execution = {}) {
  make_grouping(instance.test_case.problem, instance.test_case.grouping,
                {instance.q_data(), instance.k_data(), instance.order.data(), instance.key_means.data()}, execution);
}

void run(Instance& instance, const Execution& execution = {}) {
  forward(instance.test_case.problem, instance.test_case.grouping, instance.forward(), execution);
}

// `energy` with near keys.
Case square(std::int64_t rows, std::int64_t head_dim, Causal causal, std::int64_t window) {
  return test::square(rows, head_dim, causal,
                      {.strategy = Strategy::energy, .group_size = 2, .order_from = OrderFrom::own, .window = window});
}

TEST(CpuNear, ForwardIsWithinToleranceOnEveryCase) {
  for (const Case& test_case : typed_cases()) {
    SCOPED_TRACE(test_case.name + ", " + test::name_of(test_case.problem.dtype));
    Instance instance(test_case);
    EXPECT_EQ(explain(Operation::forward, test_case.problem, test_case.grouping).kernel,
              test::cpu_kernel(Operation::forward, test_case.problem.dtype));
    EXPECT_EQ(test::check_forward(forward, instance), "");
  }
}

TEST(CpuNear, BackwardIsWithinToleranceOnEveryCase) {
  for (const Case& test_case : typed_cases()) {
    if (test_case.grouping.skip > 0) {
      continue;
    }
    SCOPED_TRACE(test_case.name + ", " + test::name_of(test_case.problem.dtype));
    Instance instance(test_case);
    EXPECT_EQ(explain(Operation::backward, test_case.problem, test_case.grouping).kernel,
              test::cpu_kernel(Operation::backward, test_case.problem.dtype));
    EXPECT_EQ(test::check_backward(backward, instance), "");
  }
}

TEST(CpuNear, EveryInstructionSetIsWithinTolerance) {
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    for (const char* name : {"near, energy, window 129, G 3, blocks of 64 rows",
                             "skip, energy, blocks of 100 rows, mask", "skip, given, finish, additive mask"}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(std::string(name) + ", " + test::name_of(dtype) + ", " + hwy::TargetName(target));
        Instance instance(test::with_dtype(test::find(name), dtype));
        EXPECT_EQ(test::check_forward(forward, instance), "");
        if (instance.test_case.grouping.skip == 0) {
          EXPECT_EQ(test::check_backward(backward, instance), "");
        }
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

TEST(CpuNear, KeyMeansAreTheReferences) {
  for (const Case& test_case : test::near_cases()) {
    const Instance instance(test::with_dtype(test_case, DType::f16));  // the reference's means
    Instance own(instance.test_case);
    std::fill(own.key_means.begin(), own.key_means.end(), std::numeric_limits<float>::quiet_NaN());
    if (!own.key_means.empty()) {
      group(own);
    }
    for (std::size_t n = 0; n < own.key_means.size(); ++n) {
      ASSERT_NEAR(own.key_means[n], instance.key_means[n], 1e-6) << test_case.name << ", " << n;
    }
  }
}

// A mean of many keys that is small beside them keeps its digits.
TEST(CpuNear, KeyMeansOfManyKeysAreAccurate) {
  for (const Strategy strategy : {Strategy::energy, Strategy::given}) {
    Case test_case = square(1, 4, Causal::none, 0);
    test_case.problem.seq_k = 100000;
    test_case.problem = contiguous(test_case.problem);
    test_case.grouping.strategy = strategy;
    Instance instance(test_case);
    for (std::int64_t n = 0; n < instance.k.count(); ++n) {
      instance.k.set(n, instance.k.at(n) + (n / 4 % 2 == 0 ? 300 : -300));
    }
    group(instance);
    for (std::int64_t c = 0; c < 4; ++c) {
      double sum = 0;
      for (std::int64_t j = 0; j < 100000; ++j) {
        sum += instance.k.at(4 * j + c);
      }
      EXPECT_NEAR(instance.key_means[static_cast<std::size_t>(c)], sum / 100000, 300 * 0x1p-24) << "column " << c;
    }
  }
}

void forward_without_key_means(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                               const Execution& execution) {
  const auto shape = key_means_shape(problem, grouping);
  const std::vector<float> zeros(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
  ForwardTensors wrong = tensors;
  wrong.key_means = zeros.data();
  forward(problem, grouping, wrong, execution);
}
void forward_with_one_tile_less(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                                const Execution& execution) {
  Grouping wrong = grouping;
  wrong.sinks = 0;
  forward(problem, wrong, tensors, execution);
}
void forward_that_skips_more(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                             const Execution& execution) {
  Grouping wrong = grouping;
  wrong.skip = 0.5;
  forward(problem, wrong, tensors, execution);
}

TEST(CpuNear, TheSuiteCatchesWrongKernels) {
  const std::pair<test::Forward, const char*> wrong_kernels[] = {
      {forward_without_key_means, "near, energy, additive mask, negative key offset"},
      {forward_with_one_tile_less, "near, energy, additive mask, negative key offset"},
      {forward_that_skips_more, "skip, lsh"},
  };
  for (const auto& [wrong, name] : wrong_kernels) {
    Instance instance(test::with_dtype(test::find(name), DType::f32));
    EXPECT_NE(test::check_forward(wrong, instance), "") << name;
  }
}

// All that the operations make of an instance.
struct NearOutputs {
  NearOutputs(const Case& test_case, int threads) {
    Instance instance(test_case);
    Execution execution;
    execution.threads = threads;
    if (test::makes_order(test_case.grouping) || needs_key_means(test_case.grouping)) {
      group(instance, execution);
    }
    run(instance, execution);
    order = instance.order;
    key_means = instance.key_means;
    halves = instance.halves;
    o = instance.o;
    lse = instance.lse;
    if (test_case.grouping.skip == 0) {
      const Problem& p = test_case.problem;
      d_q = Buffer(instance.q.count(), p.dtype);
      d_k = Buffer(instance.k.count(), p.dtype);
      d_v = Buffer(instance.v.count(), p.dtype);
      BackwardTensors tensors{instance.q_data(), instance.k_data(), instance.v_data(), instance.mask_data(),
                              order.data(),      o.data(),          lse.data(),        o.data()};
      tensors.d_q = d_q.data();
      tensors.d_k = d_k.data();
      tensors.d_v = d_v.data();
      tensors.key_means = key_means.data();
      backward(p, test_case.grouping, tensors, execution);
    }
  }
  bool operator==(const NearOutputs& other) const = default;

  std::vector<std::int32_t> order, halves;
  std::vector<float> key_means;
  Buffer o, lse, d_q, d_k, d_v;
};

TEST(CpuNear, TheSameBitsForAnyNumberOfThreads) {
  for (const Case& test_case : test::near_cases()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Case typed = test::with_dtype(test_case, dtype);
      const NearOutputs one(typed, 1);
      EXPECT_TRUE(one == NearOutputs(typed, 5)) << test_case.name << ", " << test::name_of(dtype);
    }
  }
}

// A window as long as the keys leaves none of them far.
TEST(CpuNear, WindowOfAllKeysIsExactBitForBit) {
  for (const Causal causal : {Causal::none, Causal::bottom_right}) {
    for (const Strategy strategy : {Strategy::energy, Strategy::lsh, Strategy::given}) {
      Case test_case = square(300, 40, causal, 300);
      test_case.grouping.strategy = strategy;
      Instance grouped(test_case);
      run(grouped);
      test_case.grouping = {.strategy = Strategy::exact};
      Instance exact(test_case);
      run(exact);
      EXPECT_TRUE(grouped.o == exact.o && grouped.lse == exact.lse) << static_cast<int>(strategy);
    }
  }
}

// So small a probability skips nothing, and the answer is the one without; exact attention's where kept scores are
// finished.
TEST(CpuNear, SmallestSkipSkipsNothing) {
  for (const bool slides : {false, true}) {
    for (const bool finish : {false, true}) {
      Case test_case = square(500, 32, Causal::none, 0);
      if (slides) {
        test_case.problem.window_left = test_case.problem.window_right = 300;
      }
      Instance kept(test_case);
      if (finish) {
        kept.test_case.grouping = {.strategy = Strategy::exact};
      }
      run(kept);
      test_case.grouping.skip = 1e-30;
      test_case.grouping.finish = finish;
      Instance skipped(test_case);
      run(skipped);
      EXPECT_TRUE(finish || (kept.o == skipped.o && kept.lse == skipped.lse));
      for (std::int64_t n = 0; n < kept.o.count(); ++n) {
        ASSERT_NEAR(kept.o.at(n), skipped.o.at(n), 1e-5) << "element " << n;
      }
      for (std::size_t n = 0; n < skipped.halves.size(); n += 2) {
        EXPECT_EQ(skipped.halves[n], skipped.halves[n + 1]) << "rows " << 32 * n;
        EXPECT_GT(skipped.halves[n], 0) << "rows " << 32 * n;
      }
    }
  }
}

// What is skipped adds nothing, NaN and infinity of V included, and what is kept brings them.
TEST(CpuNear, SkippedValuesDoNotCount) {
  for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Instance instance(test::with_dtype(test::find("skip, energy, finish, G 4"), DType::f32));
    const Problem& p = instance.test_case.problem;
    for (std::int64_t j = 0; j < p.seq_k; ++j) {  // a key of every half
      instance.v.set(j / 64 * 64 * p.head_dim_v + 3, value);
    }
    EXPECT_EQ(test::check_forward(forward, instance), "") << value;
    std::int64_t skipped = 0;
    for (std::size_t n = 0; n < instance.halves.size(); n += 2) {
      skipped += instance.halves[n + 1] - instance.halves[n];
    }
    EXPECT_GT(skipped, 10);
  }
}

// A score of NaN is above any bound.
TEST(CpuNear, NanIsKept) {
  Instance instance(test::with_dtype(test::find("skip, exact"), DType::f32));
  instance.k.set(700 * 64,
                 std::numeric_limits<double>::quiet_NaN());  // far from rows 0 .. 127, in a half of low scores
  run(instance);
  EXPECT_TRUE(std::isnan(instance.o.at(0)));
}

// The largest values of V have a finite mean; the second pass that finds it skips what the first one did.
TEST(CpuNear, LargeValuesHaveAFiniteMean) {
  Instance instance(test::with_dtype(test::find("skip, energy"), DType::f32));
  for (std::int64_t n = 0; n < instance.v.count(); ++n) {
    instance.v.set(n, 3e38);
  }
  run(instance);
  for (std::int64_t n = 0; n < instance.o.count(); ++n) {
    ASSERT_NEAR(instance.o.at(n), 3e38, 1e33) << "element " << n;
  }
  const std::vector<std::int32_t> halves = instance.halves;
  for (std::int64_t n = 0; n < instance.v.count(); ++n) {
    instance.v.set(n, 1);
  }
  run(instance);
  EXPECT_EQ(halves, instance.halves);
}

// Rows up to `last` after make_grouping and forward, with the rows of Q, K and V behind it set to `later`. `skip`
// decides by 64 rows, so it is left out.
std::vector<double> near_rows_up_to(const Case& test_case, std::int64_t last, double later) {
  Instance instance(test_case);
  const std::int64_t d = test_case.problem.head_dim;
  for (Buffer* buffer : {&instance.q, &instance.k, &instance.v}) {
    for (std::int64_t n = (last + 1) * d; n < buffer->count(); ++n) {
      buffer->set(n, later);
    }
  }
  group(instance);
  run(instance);
  std::vector<double> rows;
  for (std::int64_t n = 0; n < (last + 1) * d; ++n) {
    rows.push_back(instance.o.at(n));
  }
  return rows;
}

TEST(CpuNear, PreviousIsStrictlyCausal) {
  for (const Strategy strategy : {Strategy::energy, Strategy::lsh}) {
    Case test_case = square(500, 16, Causal::top_left, 40);
    test_case.grouping.strategy = strategy;
    test_case.grouping.order_from = OrderFrom::previous;
    test_case.grouping.block = 64;
    test_case.grouping.sinks = 10;
    for (const std::int64_t last : {70, 200, 383}) {
      const std::vector<double> before = near_rows_up_to(test_case, last, 0.25);
      EXPECT_EQ(before, near_rows_up_to(test_case, last, -40)) << "rows up to " << last;
      EXPECT_EQ(before, near_rows_up_to(test_case, last, std::numeric_limits<double>::quiet_NaN())) << "NaN, " << last;
    }
  }
}

// Tasks that share the keys of a few rows see near and far ones each.
TEST(CpuNear, FewRowsAndManyKeys) {
  Case test_case = square(70, 32, Causal::none, 100);
  test_case.problem.seq_k = 5000;
  test_case.problem = contiguous(test_case.problem);
  test_case.grouping.key_offset = 4000;
  for (const double skip : {0.0, 0.01}) {
    test_case.grouping.skip = skip;
    Instance instance(test_case);
    EXPECT_EQ(test::check_forward(forward, instance), "") << "skip " << skip;
  }
}

}  // namespace
}  // namespace distr
