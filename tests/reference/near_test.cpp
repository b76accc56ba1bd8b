// SPDX-License-Identifier: Apache-2.0
// Near keys and skipped halves of tiles (method, 8): the reference against the textbook, and what must hold of any
// kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernel.h"
#include "support/failure.h"
#include "support/oracle.h"
#include "support/types_of_case.h"

namespace distr {
namespace {

using test::Case;
using test::Instance;

void near_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                  const Execution& /*execution*/) {
  Execution execution;
  execution.threads = 2;
  reference_backend().forward[0].plan(problem, grouping, execution).run(tensors, execution);
}

void near_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                   const Execution& execution) {
  reference_backend().backward[0].plan(problem, grouping, execution).run(tensors, execution);
}

Grouping energy(std::int64_t window) {
  Grouping grouping{.strategy = Strategy::energy, .group_size = 2, .order_from = OrderFrom::own};
  grouping.window = window;
  return grouping;
}

Case square(std::int64_t rows, std::int64_t head_dim, Causal causal, const Grouping& grouping) {
  return test::with_dtype(test::square(rows, head_dim, causal, grouping), DType::f64);
}

TEST(ReferenceNear, ForwardIsTheTextbook) {
  constexpr DType kTypes[] = {DType::f64, DType::bf16};
  for (std::size_t n = 0; n < test::near_cases().size(); ++n) {
    const Case& test_case = test::near_cases()[n];
    for (const DType dtype : test::types_of_case(n, kTypes)) {
      Instance instance(test::with_dtype(test_case, dtype));
      EXPECT_EQ(test::check_forward(near_forward, instance), "") << test_case.name << ", " << test::name_of(dtype);
    }
  }
}

TEST(ReferenceNear, BackwardIsTheTextbook) {
  for (const Case& test_case : test::near_cases()) {
    if (test_case.grouping.skip == 0) {
      Instance instance(test::with_dtype(test_case, DType::f64));
      EXPECT_EQ(test::check_backward(near_backward, instance), "") << test_case.name;
    }
  }
}

// A window as long as the keys leaves none of them far.
TEST(ReferenceNear, WindowOfAllKeysIsExactBitForBit) {
  Instance grouped(square(300, 32, Causal::none, energy(300)));
  Case exact_case = grouped.test_case;
  exact_case.grouping = {.strategy = Strategy::exact, .order_from = OrderFrom::own};
  Instance exact(exact_case);
  near_forward(grouped.test_case.problem, grouped.test_case.grouping, grouped.forward(), {});
  near_forward(exact_case.problem, exact_case.grouping, exact.forward(), {});
  EXPECT_TRUE(grouped.o == exact.o && grouped.lse == exact.lse);
}

// Of the keys in a sliding window no longer than the near one none is far.
TEST(ReferenceNear, SlidingWindowOfNearKeysIsExactBitForBit) {
  for (const std::int64_t left : {0, 60, 130}) {
    Instance grouped(square(500, 16, Causal::top_left, energy(130)));
    grouped.test_case.problem.window_left = left;
    Case exact_case = grouped.test_case;
    exact_case.grouping = {.strategy = Strategy::exact, .order_from = OrderFrom::own};
    Instance exact(exact_case);
    near_forward(grouped.test_case.problem, grouped.test_case.grouping, grouped.forward(), {});
    near_forward(exact_case.problem, exact_case.grouping, exact.forward(), {});
    EXPECT_TRUE(grouped.o == exact.o && grouped.lse == exact.lse) << left;
  }
}

// Key 0 is near to all rows, and those that a sliding window has left it behind are as if no sink was named.
TEST(ReferenceNear, SinksOutsideOfASlidingWindowDoNotCount) {
  Case test_case = square(500, 16, Causal::top_left, energy(20));
  test_case.problem.window_left = 200;
  Instance without(test_case);
  near_forward(test_case.problem, test_case.grouping, without.forward(), {});
  test_case.grouping.sinks = 1;
  Instance with(test_case);
  near_forward(test_case.problem, test_case.grouping, with.forward(), {});
  bool earlier_differ = false;
  for (std::int64_t n = 0; n < with.o.count(); ++n) {
    const bool sees_tile_0 = n / 16 - 200 < 128;
    earlier_differ = earlier_differ || with.o.at(n) != without.o.at(n);
    ASSERT_TRUE(sees_tile_0 || with.o.at(n) == without.o.at(n)) << "row " << n / 16;
  }
  EXPECT_TRUE(earlier_differ);
}

// Where no key_offset says where rows stand for their near keys, the sliding window's offset does.
TEST(ReferenceNear, NearKeysStandWhereTheSlidingWindowDoes) {
  Case test_case = square(300, 16, Causal::none, energy(10));
  test_case.problem.window_left = test_case.problem.window_right = 190;
  test_case.problem.window_offset = 140;
  Instance implied(test_case);
  near_forward(test_case.problem, test_case.grouping, implied.forward(), {});
  test_case.grouping.key_offset = 140;
  Instance named(test_case);
  near_forward(test_case.problem, test_case.grouping, named.forward(), {});
  EXPECT_TRUE(implied.o == named.o);
  test_case.grouping.key_offset = 0;
  Instance other(test_case);
  near_forward(test_case.problem, test_case.grouping, other.forward(), {});
  EXPECT_FALSE(implied.o == other.o);
}

TEST(ReferenceNear, SmallestSkipSkipsNothing) {
  Case test_case = square(500, 32, Causal::none, energy(0));
  Instance kept(test_case);
  near_forward(test_case.problem, test_case.grouping, kept.forward(), {});
  test_case.grouping.skip = 1e-30;
  Instance skipped(test_case);
  near_forward(test_case.problem, test_case.grouping, skipped.forward(), {});
  EXPECT_TRUE(kept.o == skipped.o && kept.lse == skipped.lse);
  for (std::size_t n = 0; n < skipped.halves.size(); n += 2) {
    EXPECT_EQ(skipped.halves[n], skipped.halves[n + 1]) << "rows " << 32 * n;
    EXPECT_GT(skipped.halves[n], 0) << "rows " << 32 * n;
  }
}

// No row changes when later rows of Q, K and V do. `skip` decides by 64 rows, so it is left out.
TEST(ReferenceNear, PreviousIsStrictlyCausal) {
  Grouping grouping = energy(40);
  grouping.order_from = OrderFrom::previous;
  grouping.block = 64;
  grouping.sinks = 10;
  const Case test_case = square(500, 16, Causal::top_left, grouping);
  for (const std::int64_t last : {70, 200, 383}) {
    Instance before(test_case);
    Instance after(test_case);
    for (test::Buffer* buffer : {&after.q, &after.k, &after.v}) {
      for (std::int64_t n = (last + 1) * 16; n < buffer->count(); ++n) {
        buffer->set(n, 1000);
      }
    }
    after.make_order();
    near_forward(test_case.problem, grouping, before.forward(), {});
    near_forward(test_case.problem, grouping, after.forward(), {});
    for (std::int64_t n = 0; n < (last + 1) * 16; ++n) {
      ASSERT_EQ(before.o.at(n), after.o.at(n)) << "row " << n / 16 << ", changed after " << last;
    }
  }
}

// The means are over the keys before the block, and of none 0.
TEST(ReferenceNear, KeyMeansOfPreviousAreThoseOfEarlierKeys) {
  Grouping grouping = energy(0);
  grouping.order_from = OrderFrom::previous;
  const Instance instance(square(300, 8, Causal::top_left, grouping));
  ASSERT_EQ(instance.key_means.size(), std::size_t{3 * 8});
  for (std::size_t c = 0; c < 8; ++c) {
    double sum = 0;
    for (std::int64_t j = 0; j < 256; ++j) {
      sum += instance.k.at(j * 8 + static_cast<std::int64_t>(c));
    }
    EXPECT_EQ(instance.key_means[c], 0.0F);
    EXPECT_NEAR(instance.key_means[16 + c], sum / 256, 1e-6);
  }
}

TEST(NearKeys, WrongValuesAreNamed) {
  const auto refusal = [](const auto& change) {
    Case test_case = square(300, 32, Causal::none, energy(100));
    change(test_case);
    return test::failure([&] { validate(test_case.problem, test_case.grouping); }).second;
  };
  EXPECT_EQ(refusal([](Case& c) { c.grouping.window = -1; }), "window is -1; allowed: 0 to 1099511627776");
  EXPECT_EQ(refusal([](Case& c) { c.grouping.sinks = -5; }), "sinks is -5; allowed: 0 to 1099511627776");
  EXPECT_NE(refusal([](Case& c) { c.grouping.skip = 1; }).find("skip is 1"), std::string::npos);
  EXPECT_NE(refusal([](Case& c) { c.grouping.skip = -0.5; }).find("skip is -0.5"), std::string::npos);
  EXPECT_NE(refusal([](Case& c) { c.grouping.finish = true; }).find("finish is set without skip"), std::string::npos);
  EXPECT_NE(refusal([](Case& c) {
              c.grouping.skip = 0.1;
              c.grouping.window.reset();
            }).find("neither window nor sinks"),
            std::string::npos);
  EXPECT_NE(refusal([](Case& c) {
              c.grouping = {.strategy = Strategy::lsh, .group_size = 2, .window = 5, .skip = 0.1, .finish = true};
            }).find("strategy lsh"),
            std::string::npos);
  EXPECT_NE(refusal([](Case& c) {
              c.problem.causal = Causal::top_left;
              c.grouping.key_offset = 3;
            }).find("key_offset is 3 in a causal call"),
            std::string::npos);
}

TEST(NearKeys, SkipIsRefusedWithGradients) {
  Grouping grouping = energy(10);
  grouping.skip = 0.01;
  const Case test_case = square(300, 32, Causal::none, grouping);
  const auto [status, message] = test::failure([&] { (void)plan(Operation::backward, test_case.problem, grouping); });
  EXPECT_EQ(status, Status::invalid_argument);
  EXPECT_NE(message.find("skip is 0.01"), std::string::npos) << message;
  EXPECT_EQ(explain(Operation::backward, test_case.problem, grouping).kernel, "");
}

}  // namespace
}  // namespace distr
