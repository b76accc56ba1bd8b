// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "support/oracle.h"
#include "support/types_of_case.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

// Attention over the keys [first, first + count) of an instance.
void forward_shard(Instance& instance, std::int64_t first, std::int64_t count, Buffer& o, Buffer& lse) {
  Problem shard = instance.test_case.problem;
  shard.seq_k = count;
  shard.window_offset = shard.window_offset.value_or(0) - first;  // of a sliding window, where there is one
  ForwardTensors tensors = instance.forward_into(o, lse);
  const auto skip = [&](const void* data, const Strides& strides) {
    return static_cast<const std::byte*>(data) + static_cast<std::size_t>(first * strides.row) * size_of(shard.dtype);
  };
  tensors.k = skip(tensors.k, shard.k);
  tensors.v = skip(tensors.v, shard.v);
  forward(shard, instance.test_case.grouping, tensors);
}

TEST(Merge, ShardsOfTheKeysUnderOneOrderGiveTheWhole) {
  constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16};
  for (std::size_t n = 0; n < test::cases().size(); ++n) {
    const Case& original = test::cases()[n];
    const Problem& p = original.problem;
    if (p.causal != Causal::none || p.mask.kind != MaskKind::none || original.packed || p.seq_k < 3) {
      continue;  // a mask or a diagonal would have to be cut too
    }
    if (p.window_offset.value_or(0) - p.seq_k < -kMaxDistance) {
      continue;  // a shard's window would lie further off than one may
    }
    for (const DType dtype : test::types_of_case(n, kTypes)) {
      SCOPED_TRACE(original.name + ", " + test::name_of(dtype));
      Instance instance(test::with_dtype(original, dtype));
      std::array<Buffer, 3> o{instance.output(), instance.output(), instance.output()};
      std::array<Buffer, 3> lse{instance.lse_output(), instance.lse_output(), instance.lse_output()};
      const std::int64_t third = p.seq_k / 3;
      forward_shard(instance, 0, third, o[0], lse[0]);
      forward_shard(instance, third, 0, o[1], lse[1]);  // a part without keys
      forward_shard(instance, third, p.seq_k - third, o[2], lse[2]);
      const std::array<Partial, 3> parts{
          {{o[0].data(), lse[0].data()}, {o[1].data(), lse[1].data()}, {o[2].data(), lse[2].data()}}};
      merge(instance.test_case.problem, parts, instance.o.data(), instance.lse.data());
      const auto got = test::written(instance.test_case.problem, instance.o, instance.lse);
      const auto truth = test::textbook(instance, test::Precision::float64);
      const auto plain = test::textbook(instance, test::Precision::plain);
      EXPECT_EQ(test::judge(got.o, truth.o, test::largest_error(plain.o, truth.o), dtype), "");
      EXPECT_EQ(test::judge(got.lse, truth.lse, test::largest_error(plain.lse, truth.lse), instance.lse.dtype()), "");
    }
  }
}

TEST(Merge, RowsThatNoPartSawAreZero) {
  Problem problem;
  problem.seq_q = 1;
  problem.head_dim = problem.head_dim_v = 2;
  problem = contiguous(problem);
  const std::array<float, 2> o_part{3, 4};
  const float lse_part = -std::numeric_limits<float>::infinity();
  const std::array<Partial, 2> parts{{{o_part.data(), &lse_part}, {o_part.data(), &lse_part}}};
  std::array<float, 2> o{9, 9};
  float lse = 9;
  merge(problem, parts, o.data(), &lse);
  EXPECT_EQ(o, (std::array<float, 2>{0, 0}));
  EXPECT_EQ(lse, lse_part);
}

Problem problem_of_one_row() {
  Problem problem;
  problem.seq_q = 1;
  problem.head_dim = problem.head_dim_v = 2;
  return contiguous(problem);
}

TEST(Merge, PartsWithoutLseAreAddedUp) {
  const std::array<float, 2> first{3, 4}, second{1, -4};
  const std::array<double, 2> third{0.5, 8};
  const std::array<Partial, 3> parts{{{first.data()}, {second.data()}, {third.data(), nullptr, DType::f64}}};
  std::array<float, 2> o{9, 9};
  merge(problem_of_one_row(), parts, o.data(), nullptr);
  EXPECT_EQ(o, (std::array<float, 2>{4.5, 8}));
}

TEST(Merge, NullIsRefused) {
  const std::array<float, 2> values{3, 4};
  std::array<float, 2> o{};
  float lse = 0;
  const auto refused = [&](const Partial& first, const Partial& second, float* into) {
    const std::array<Partial, 2> parts{first, second};
    EXPECT_THROW(merge(problem_of_one_row(), parts, o.data(), into), Error);
  };
  refused({}, {}, nullptr);
  refused({values.data(), &lse}, {values.data()}, nullptr);
  refused({values.data()}, {values.data(), &lse}, nullptr);
  refused({values.data()}, {values.data()}, &lse);
}

}  // namespace
}  // namespace distr
