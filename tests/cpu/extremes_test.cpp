// SPDX-License-Identifier: Apache-2.0
// NaN, infinity, the ends of the number range, and masks of odd strides.
#include <gtest/gtest.h>

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/oracle.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A NaN or an infinity goes where exact attention takes it, and nowhere else.
TEST(CpuForward, NanAndInfinityGoWhereTheyGoInExactAttention) {
  constexpr double kValues[] = {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()};
  // Infinity makes NaN too: sanitizers, which slow every value, are shown it alone.
  const std::span<const double> values = std::span(kValues).first(DISTR_SANITIZED != 0 ? 1 : 3);
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(hwy::TargetName(target));
    for (const char* name : {"odd sizes", "causal, square", "padding mask", "additive mask", "energy", "lsh, mean",
                             "sliding window across tiles", "softcap, causal, GQA"}) {
      for (const double value : values) {
        for (int which = 0; which < 3; ++which) {
          Instance instance(test::with_dtype(test::find(name), DType::f32));
          Buffer& buffer = which == 0 ? instance.q : which == 1 ? instance.k : instance.v;
          buffer.set(buffer.count() / 2, value);
          EXPECT_EQ(test::check_forward(forward, instance), "") << name << ", " << value << " in "
                                                                << "qkv"[which];
        }
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

// One query q = 1 and keys k, values v, all of dimension 1; returns O and LSE.
template <std::size_t kKeys>
std::array<double, 2> attend(const std::array<float, kKeys>& k, const std::array<float, kKeys>& v,
                             const std::array<float, kKeys>* bias, DType dtype) {
  Problem problem;
  problem.seq_q = 1;
  problem.seq_k = kKeys;
  problem.head_dim = problem.head_dim_v = 1;
  problem.dtype = dtype;
  problem = contiguous(problem);
  if (bias != nullptr) {
    problem.mask = {MaskKind::additive, DType::f32, 1, {kKeys}, {1}};
  }
  Buffer q(1, dtype);
  Buffer keys(kKeys, dtype);
  Buffer values(kKeys, dtype);
  Buffer o(1, dtype);
  Buffer lse(1, problem.lse_dtype());
  q.set(0, 1);
  convert(k.data(), DType::f32, keys.data(), dtype, kKeys);
  convert(v.data(), DType::f32, values.data(), dtype, kKeys);
  Grouping grouping;
  grouping.strategy = Strategy::exact;
  grouping.group_size = 1;
  ForwardTensors tensors;
  tensors.q = q.data();
  tensors.k = keys.data();
  tensors.v = values.data();
  tensors.mask = bias == nullptr ? nullptr : bias->data();
  tensors.o = o.data();
  tensors.lse = lse.data();
  forward(problem, grouping, tensors);
  return {o.at(0), lse.at(0)};
}

// Masks made of the lowest finite number hide nothing where they stand on a whole row.
TEST(Extremes, TheLowestFiniteBiasHidesNothing) {
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  const std::array<float, 2> bias{kLowest, kLowest};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    EXPECT_EQ((attend<2>({0, 0}, {2, 4}, &bias, dtype)[0]), 3) << test::name_of(dtype);
  }
  const std::array<float, 2> one{kLowest, 0};
  EXPECT_EQ((attend<2>({0, 0}, {2, 4}, &one, DType::f32)[0]), 4);
}

TEST(Extremes, EqualHugeScoresShareEqually) {
  const std::array<float, 4> bias{-1e17F, -1e17F, -1e17F, -1e17F};
  for (const DType dtype : {DType::f32, DType::f64}) {
    EXPECT_EQ((attend<4>({0, 0, 0, 0}, {1, 2, 3, 4}, &bias, dtype)[0]), 2.5) << test::name_of(dtype);
  }
}

// The rounding of a row's sum grows with the number of its tiles of keys, not of its keys: equal terms round one way.
TEST(Extremes, SumsOfManyEqualTermsArePrecise) {
  Problem problem;
  problem.heads_q = 32;  // tasks enough that none shares keys
  problem.seq_q = 1;
  problem.seq_k = 20000;
  problem.head_dim = problem.head_dim_v = 1;
  problem = contiguous(problem);
  const std::vector<float> q(32, 1);
  std::vector<float> k(20000, -1.2F);  // P = 0.301...
  const std::vector<float> v(20000, 1);
  const double expected = std::log(1 + 19999 * std::exp(static_cast<double>(k[1])));
  k[0] = 0;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    std::vector<float> o(32);
    std::vector<float> lse(32);
    ForwardTensors tensors;
    tensors.q = q.data();
    tensors.k = k.data();
    tensors.v = v.data();
    tensors.o = o.data();
    tensors.lse = lse.data();
    forward(problem, {.strategy = Strategy::exact, .group_size = 1}, tensors);
    EXPECT_NEAR(lse[0], expected, 5e-6) << hwy::TargetName(target);
    EXPECT_NEAR(o[0], 1, 5e-6) << hwy::TargetName(target);
  }
  hwy::SetSupportedTargetsForTest(0);
}

// A probability that underflows to 0 contributes nothing, whether or not anything is masked.
TEST(Extremes, ProbabilityZeroTimesInfinityIsZero) {
  const std::array<float, 2> no_bias{0, 0};
  for (const DType dtype : {DType::f32, DType::f64}) {
    EXPECT_EQ((attend<2>({0, -1000}, {5, kInfinity}, nullptr, dtype)[0]), 5) << test::name_of(dtype);
    EXPECT_EQ((attend<2>({0, -1000}, {5, kInfinity}, &no_bias, dtype)[0]), 5) << test::name_of(dtype);
  }
}

// The same when the better key comes tiles later, and the first tile's infinity has to be forgotten.
TEST(Extremes, AnInfinityIsForgottenWhenItsWeightUnderflows) {
  std::array<float, 300> k{};
  std::array<float, 300> v{};
  v.fill(1);
  v[3] = kInfinity;
  k[290] = 1000;
  v[290] = 7;
  for (const DType dtype : {DType::f32, DType::f64}) {
    EXPECT_EQ(attend<300>(k, v, nullptr, dtype)[0], 7) << test::name_of(dtype);
  }
}

// Sums of values overflow where their mean does not, in one task of keys and in several, and whatever stands beside.
TEST(Extremes, ValuesNearTheLargestHaveAFiniteMean) {
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(hwy::TargetName(target));
    for (const auto& [rows, keys] : {std::pair<std::int64_t, std::int64_t>{1, 20000}, {200, 300}}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        if (dtype == DType::f64 && rows == 1) continue;
        SCOPED_TRACE(std::string(test::name_of(dtype)) + ", keys " + std::to_string(keys));
        Case test_case;
        test_case.problem.dtype = dtype;
        test_case.problem.seq_q = rows;
        test_case.problem.seq_k = keys;
        test_case.problem.head_dim = 8;
        test_case.problem.head_dim_v = 3;
        test_case.problem = contiguous(test_case.problem);
        test_case.grouping = {.strategy = Strategy::exact};
        Instance instance(test_case);
        forward(test_case.problem, test_case.grouping, instance.forward());
        const Buffer plain = instance.o;
        const Buffer lse = instance.lse;
        const double huge = dtype == DType::f64 ? 1e308 : 3e38;
        for (std::int64_t j = 0; j < keys; ++j) {
          instance.v.set(3 * j, huge);
          instance.v.set(3 * j + 1, -huge);
        }
        forward(test_case.problem, test_case.grouping, instance.forward());
        EXPECT_TRUE(instance.lse == lse);
        for (std::int64_t i = 0; i < rows; ++i) {
          EXPECT_NEAR(instance.o.at(3 * i) / huge, 1, 0.01);
          EXPECT_NEAR(instance.o.at(3 * i + 1) / huge, -1, 0.01);
          EXPECT_EQ(instance.o.at(3 * i + 2), plain.at(3 * i + 2));
        }
        instance.v.set(0, kInfinity);
        forward(test_case.problem, test_case.grouping, instance.forward());
        EXPECT_EQ(instance.o.at(0), kInfinity);
        EXPECT_NEAR(instance.o.at(1) / huge, -1, 0.01);
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

// A row's probabilities may reach 2^8 before they are divided by their sum.
TEST(Extremes, LargeValuesHaveAFiniteMeanWhereScoresGrow) {
  std::array<float, 300> k{};
  std::array<float, 300> v{};
  std::fill(k.begin() + 128, k.end(), 5.5F);
  v.fill(3e38F);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    EXPECT_NEAR(attend<300>(k, v, nullptr, dtype)[0] / 3e38, 1, 0.01) << test::name_of(dtype);
  }
}

// Masks read through negative and zero strides equal the same mask laid out plainly.
TEST(Extremes, MasksOfAnyStrides) {
  for (const MaskKind kind : {MaskKind::boolean, MaskKind::additive}) {
    Case plain = test::with_dtype(test::find("boolean mask"), DType::f32);
    Problem& p = plain.problem;
    p.mask = {kind, DType::f32, 2, {p.seq_q, p.seq_k}, {p.seq_k, 1}};
    Instance instance(plain);
    const auto count = static_cast<std::size_t>(p.seq_q * p.seq_k);
    std::vector<float> reversed(count);
    std::vector<std::uint8_t> reversed_boolean(count);
    for (std::size_t n = 0; n < count; ++n) {
      reversed[count - 1 - n] = static_cast<float>(instance.mask.at(static_cast<std::int64_t>(n)));
      reversed_boolean[count - 1 - n] = instance.boolean_mask[n];
    }
    forward(p, plain.grouping, instance.forward());
    Problem backwards = p;
    backwards.mask = {kind, DType::f32, 4, {1, p.heads_q, p.seq_q, p.seq_k}, {99, 0, -p.seq_k, -1}};
    Buffer o = instance.output();
    Buffer lse = instance.lse_output();
    ForwardTensors tensors = instance.forward_into(o, lse);
    tensors.mask = kind == MaskKind::boolean ? static_cast<const void*>(&reversed_boolean[count - 1])
                                             : static_cast<const void*>(&reversed[count - 1]);
    forward(backwards, plain.grouping, tensors);
    EXPECT_TRUE(o == instance.o && lse == instance.lse);
  }
}

}  // namespace
}  // namespace distr
