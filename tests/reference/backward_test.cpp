// SPDX-License-Identifier: Apache-2.0
// The reference's backward against finite differences of its forward, the order held constant.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "kernel.h"
#include "support/normal.h"
#include "support/oracle.h"
#include "support/types_of_case.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

// L = sum dO * O + sum dLSE * LSE, whose gradients backward() gives.
struct Loss {
  Loss(Instance& the_instance, bool use_lse)
      : instance(the_instance), d_o(the_instance.output()), d_lse(the_instance.lse_output()) {
    std::mt19937_64 random(3);
    test::Normal normal;
    for (std::int64_t n = 0; n < d_o.count(); ++n) {
      d_o.set(n, normal(random));
    }
    for (std::int64_t n = 0; n < d_lse.count(); ++n) {
      d_lse.set(n, use_lse ? normal(random) : 0);
    }
  }

  double value() {
    const Problem& p = instance.test_case.problem;
    forward(p, instance.test_case.grouping, instance.forward());
    const test::Result got = test::written(p, instance.o, instance.lse);
    const test::Result weights = test::written(p, d_o, d_lse);
    double sum = 0;
    for (std::size_t n = 0; n < got.o.size(); ++n) {
      sum += weights.o[n] * got.o[n];
    }
    for (std::size_t n = 0; n < got.lse.size(); ++n) {
      sum += std::isfinite(got.lse[n]) ? weights.lse[n] * got.lse[n] : 0;
    }
    return sum;
  }

  Instance& instance;
  Buffer d_o, d_lse;
};

// Which elements of a buffer the strides reach; the others are gaps, whose poison must stay.
std::vector<bool> reached(const Strides& s, std::int64_t batch, std::int64_t heads, std::int64_t rows,
                          std::int64_t columns) {
  std::vector<bool> result(static_cast<std::size_t>(test::extent(s, batch, heads, rows, columns)));
  for (std::int64_t row = 0; row < batch * heads * rows; ++row) {
    const std::int64_t start = row / rows / heads * s.batch + row / rows % heads * s.head + row % rows * s.row;
    for (std::int64_t c = 0; c < columns; ++c) {
      result[static_cast<std::size_t>(start + c)] = true;
    }
  }
  return result;
}

// Differences of the loss when `input` moves, against `gradient`; every element unless they are many, and few under
// sanitizers, to which every forward is the same.
void expect_gradient(Loss& loss, Buffer& input, const Buffer& gradient, const std::vector<bool>& elements,
                     const char* name) {
  constexpr double kStep = 1e-5;
  constexpr std::int64_t kElements = DISTR_SANITIZED == 0 ? 150 : 10;
  const std::int64_t stride = std::max<std::int64_t>(1, input.count() / kElements);
  for (std::int64_t n = 0; n < input.count(); n += stride) {
    if (!elements[static_cast<std::size_t>(n)]) {
      EXPECT_TRUE(std::isnan(gradient.at(n))) << name << " wrote into the gap at " << n;
      continue;
    }
    const double here = input.at(n);
    if (!std::isfinite(here)) {
      EXPECT_EQ(gradient.at(n), 0) << name << " " << n;
      continue;
    }
    input.set(n, here + kStep);
    const double above = loss.value();
    input.set(n, here - kStep);
    const double below = loss.value();
    input.set(n, here);
    const double difference = (above - below) / (2 * kStep);
    ASSERT_NEAR(gradient.at(n), difference, 1e-7 * (1 + std::abs(difference))) << name << " " << n;
  }
}

void expect_gradients(const Case& test_case, bool use_lse) {
  Instance instance(test_case);
  Loss loss(instance, use_lse);
  loss.value();
  const Problem& p = test_case.problem;
  Buffer d_q(instance.q.count(), DType::f64);
  Buffer d_k(instance.k.count(), DType::f64);
  Buffer d_v(instance.v.count(), DType::f64);
  Buffer d_mask(instance.mask.count(), DType::f64);
  const bool additive = p.mask.kind == MaskKind::additive;
  backward(p, test_case.grouping,
           {instance.q_data(), instance.k_data(), instance.v_data(), instance.mask_data(), instance.order.data(),
            instance.o.data(), instance.lse.data(), loss.d_o.data(), use_lse ? loss.d_lse.data() : nullptr, d_q.data(),
            d_k.data(), d_v.data(), additive ? d_mask.data() : nullptr});
  expect_gradient(loss, instance.q, d_q, reached(p.q, p.batch, p.heads_q, p.seq_q, p.head_dim), "dQ");
  expect_gradient(loss, instance.k, d_k, reached(p.k, p.batch, p.heads_kv, p.seq_k, p.head_dim), "dK");
  expect_gradient(loss, instance.v, d_v, reached(p.v, p.batch, p.heads_kv, p.seq_k, p.head_dim_v), "dV");
  if (additive) {
    expect_gradient(loss, instance.mask, d_mask, std::vector<bool>(static_cast<std::size_t>(d_mask.count()), true),
                    "dMask");
  }
  EXPECT_TRUE(d_q.canaries_intact() && d_k.canaries_intact() && d_v.canaries_intact() && d_mask.canaries_intact());
}

void reference_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                        const Execution& execution) {
  reference_backend().backward[0].plan(problem, grouping, execution).run(tensors, execution);
}

Case small(std::int64_t seq_q, std::int64_t seq_k) {
  Case result;
  Problem& p = result.problem;
  p.batch = 2;
  p.heads_q = 2;
  p.heads_kv = 1;
  p.seq_q = seq_q;
  p.seq_k = seq_k;
  p.head_dim = 5;
  p.head_dim_v = 3;
  p.dtype = DType::f64;
  p = contiguous(p);
  result.grouping.block = 4;
  return result;
}

Mask additive_mask(std::initializer_list<std::int64_t> shape) {
  Mask mask;
  mask.kind = MaskKind::additive;
  mask.dtype = DType::f64;
  mask.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), mask.shape.begin());
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    mask.strides[axis] = stride;
    stride *= mask.shape[axis];
  }
  return mask;
}

TEST(ReferenceBackward, EqualsFiniteDifferencesForEveryWayOfGrouping) {
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh, Strategy::energy}) {
    for (const Estimator estimator : {Estimator::sample, Estimator::mean}) {
      for (const OrderFrom order_from : {OrderFrom::own, OrderFrom::previous}) {
        for (const std::int64_t group_size : {1, 2, 3}) {
          Case test_case = small(10, 7);
          test_case.grouping.strategy = strategy;
          test_case.grouping.estimator = estimator;
          test_case.grouping.order_from = order_from;
          test_case.grouping.group_size = group_size;
          SCOPED_TRACE(testing::Message()
                       << "strategy " << static_cast<int>(strategy) << ", estimator " << static_cast<int>(estimator)
                       << ", order from " << static_cast<int>(order_from) << ", G " << group_size);
          expect_gradients(test_case, true);
        }
      }
    }
  }
}

TEST(ReferenceBackward, EqualsFiniteDifferencesForEveryMask) {
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh, Strategy::energy}) {
    for (const Causal causal : {Causal::top_left, Causal::bottom_right}) {
      for (const auto& [seq_q, seq_k] : {std::pair{6, 9}, std::pair{9, 6}}) {
        Case test_case = small(seq_q, seq_k);
        test_case.grouping.strategy = strategy;
        test_case.problem.causal = causal;
        SCOPED_TRACE(testing::Message() << "causal " << static_cast<int>(causal) << " " << seq_q << " x " << seq_k);
        expect_gradients(test_case, true);
      }
    }
    for (const auto& mask : {additive_mask({2, 2, 6, 9}), additive_mask({2, 1, 1, 9}), additive_mask({6, 9}),
                             additive_mask({6, 1}), additive_mask({})}) {
      Case test_case = small(6, 9);
      test_case.grouping.strategy = strategy;
      test_case.problem.mask = mask;
      SCOPED_TRACE(testing::Message() << "additive mask of rank " << mask.rank);
      expect_gradients(test_case, true);
    }
    Case test_case = small(6, 9);
    test_case.grouping.strategy = strategy;
    test_case.problem.mask = additive_mask({6, 9});
    test_case.problem.mask.kind = MaskKind::boolean;
    expect_gradients(test_case, false);
  }
}

TEST(ReferenceBackward, EqualsFiniteDifferencesWithCappedScores) {
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh, Strategy::energy}) {
    for (const double softcap : {0.3, 2.0}) {
      for (const auto& mask : {Mask{}, additive_mask({2, 1, 6, 9}), additive_mask({9})}) {
        Case test_case = small(6, 9);
        test_case.grouping.strategy = strategy;
        test_case.grouping.group_size = strategy == Strategy::exact ? 1 : 2;
        test_case.problem.softcap = softcap;
        test_case.problem.mask = mask;
        SCOPED_TRACE(testing::Message() << "strategy " << static_cast<int>(strategy) << ", softcap " << softcap
                                        << ", mask of rank " << mask.rank);
        expect_gradients(test_case, true);
      }
    }
  }
}

TEST(ReferenceBackward, FullyHiddenRowsHaveFiniteGradients) {
  Case test_case = small(6, 3);
  test_case.problem.causal = Causal::bottom_right;  // rows 0 .. 2 see nothing
  expect_gradients(test_case, true);
  test_case = small(4, 5);
  test_case.problem.mask = additive_mask({4, 5});
  test_case.mask_hides_all = true;
  expect_gradients(test_case, true);
}

// f64, and in turn one of the types that loads and stores alone tell from it.
TEST(ReferenceBackward, IsTheTextbookOnEveryCase) {
  constexpr DType kTypes[][2] = {{DType::f64, DType::bf16}, {DType::f64, DType::f32}, {DType::f64, DType::f16}};
  for (std::size_t n = 0; n < test::cases().size(); ++n) {
    const Case& test_case = test::cases()[n];
    for (const DType dtype : test::types_of_case(n, kTypes[n % 3])) {
      Instance instance(test::with_dtype(test_case, dtype));
      EXPECT_EQ(test::check_backward(reference_backward, instance), "")
          << test_case.name << ", " << test::name_of(dtype);
    }
  }
}

TEST(ReferenceBackward, StridedTensors) {
  for (const Case& original : test::cases()) {
    if (original.name == "gaps between rows" || original.name == "rows before heads") {
      SCOPED_TRACE(original.name);
      expect_gradients(test::with_dtype(original, DType::f64), true);
    }
  }
}

}  // namespace
}  // namespace distr
