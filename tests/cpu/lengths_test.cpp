// SPDX-License-Identifier: Apache-2.0
// Lengths that are data, on the CPU: the shared problems between neighbours of other lengths (support/lengths.h), and
// what is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "distr/measure.h"
#include "kernel.h"
#include "support/lengths.h"
#include "support/oracle.h"
#include "support/types_of_case.h"

namespace distr {
namespace {

using test::Case;
using test::Instance;
using test::LengthsAs;

constexpr DType kTypesOfLengths[] = {DType::f32, DType::bf16, DType::f64};  // f64: the reference

template <LengthsAs kKind>
void forward_with_lengths(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                          const Execution& execution) {
  const test::WithLengths<ForwardTensors> call(kKind, problem, tensors);
  forward(call.problem(), grouping, call.tensors(), execution);
  call.take_results();
}

void backward_of_packed(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                        const Execution& execution) {
  const test::WithLengths<BackwardTensors> call(LengthsAs::packed, problem, tensors);
  backward(call.problem(), grouping, call.tensors(), execution);
  call.take_results();
}

TEST(CpuLengths, AreThoseOfEachEntryOnEveryCase) {
  int checked = 0;
  for (std::size_t n = 0; n < test::cases().size(); ++n) {
    for (const DType dtype : test::types_of_case(n, kTypesOfLengths)) {
      Instance instance(test::with_dtype(test::cases()[n], dtype));
      const std::string label = test::cases()[n].name + ", " + test::name_of(dtype);
      if (test::can_have_lengths(instance.test_case, LengthsAs::keys)) {
        EXPECT_EQ(test::check_forward(forward_with_lengths<LengthsAs::keys>, instance), "") << label;
        ++checked;
      }
      if (test::can_have_lengths(instance.test_case, LengthsAs::packed)) {
        EXPECT_EQ(test::check_forward(forward_with_lengths<LengthsAs::packed>, instance), "") << label;
        EXPECT_EQ(test::check_backward(backward_of_packed, instance), "") << label;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 30);
}

// The check must see a length that is wrong.
void forward_of_one_key_more(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                             const Execution& execution) {
  const test::WithLengths<ForwardTensors> call(LengthsAs::keys, problem, tensors);
  std::vector<std::int32_t> keys(call.tensors().lengths.keys, call.tensors().lengths.keys + call.problem().batch);
  keys[1] += 1;
  ForwardTensors wrong = call.tensors();
  wrong.lengths.keys = keys.data();
  forward(call.problem(), grouping, wrong, execution);
  call.take_results();
}

TEST(CpuLengths, WouldBeSeenToBeWrong) {
  Instance instance(test::with_dtype(test::find("GQA"), DType::f32));
  EXPECT_NE(test::check_forward(forward_of_one_key_more, instance), "");
}

// Neighbours that are longer make the tasks; the bits are those of the entry alone, but for how its keys are split.
TEST(CpuLengths, HaveTheBitsOfTheEntryAlone) {
  Instance alone(test::with_dtype(test::find("GQA"), DType::f32));
  forward(alone.test_case.problem, alone.test_case.grouping, alone.forward());
  for (const auto with : {forward_with_lengths<LengthsAs::keys>, forward_with_lengths<LengthsAs::packed>}) {
    Instance among(alone.test_case);
    with(among.test_case.problem, among.test_case.grouping, among.forward(), {});
    EXPECT_TRUE(among.o == alone.o && among.lse == alone.lse);
  }
}

// What the message of a call with these lengths says; "": it is served.
std::string refusal(Problem problem, const Lengths& lengths, const Grouping& grouping = {.strategy = Strategy::exact}) {
  const std::vector<float> in(4096);
  std::vector<float> out(4096);
  ForwardTensors tensors{in.data(), in.data(), in.data(), nullptr, nullptr, out.data()};
  tensors.lengths = lengths;
  try {
    forward(contiguous(problem), grouping, tensors);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    return error.what();
  }
  return "";
}

Problem of_lengths() {
  Problem problem;
  problem.batch = 2;
  problem.seq_q = problem.seq_k = 8;
  problem.head_dim = problem.head_dim_v = 16;
  return problem;
}

TEST(CpuLengths, AreRefusedWhereTheyReachBehindTheTensors) {
  Problem keys = of_lengths();
  keys.key_lengths = true;
  const auto with_keys = [&](std::vector<std::int32_t> lengths) { return refusal(keys, {.keys = lengths.data()}); };
  EXPECT_EQ(with_keys({8, 0}), "");
  EXPECT_EQ(with_keys({8, 9}), "the length of the keys of entry 1 is 9; allowed: 0 to 8");
  EXPECT_EQ(with_keys({-1, 8}), "the length of the keys of entry 0 is -1; allowed: 0 to 8");
  EXPECT_EQ(refusal(keys, {}), "the lengths of the keys is null; allowed: memory of the problem's sizes");

  Problem packed = of_lengths();
  packed.packed = {10, 12};
  const auto with_starts = [&](std::vector<std::int32_t> q, std::vector<std::int32_t> k) {
    return refusal(packed, {.starts_q = q.data(), .starts_k = k.data()});
  };
  EXPECT_EQ(with_starts({0, 3, 10}, {0, 8, 12}), "");
  EXPECT_EQ(with_starts({1, 3, 10}, {0, 8, 12}), "starts_q[0] is 1; allowed: 0");
  EXPECT_EQ(with_starts({0, 3, 9}, {0, 8, 12}), "starts_q[2] is 9; allowed: 10");
  EXPECT_EQ(with_starts({0, 3, 10}, {0, 13, 12}), "starts_k[1] is 13; allowed: 0 to 12");
  EXPECT_EQ(with_starts({0, -1, 10}, {0, 8, 12}), "starts_q[1] is -1; allowed: 0 to 10");
  EXPECT_EQ(with_starts({0, 1, 10}, {0, 8, 12}), "starts_q[2] - starts_q[1] is 9; allowed: 0 to 8");
}

TEST(CpuLengths, AreExactAttentions) {
  Problem keys = of_lengths();
  keys.key_lengths = true;
  const std::vector<std::int32_t> lengths{8, 8};
  const Lengths given{.keys = lengths.data()};
  EXPECT_EQ(refusal(keys, given, {.strategy = Strategy::energy, .group_size = 2}),
            "key_lengths was given with strategy energy; allowed: exact, auto, or a group size of 1");
  EXPECT_EQ(refusal(keys, given, {.strategy = Strategy::automatic, .group_size = 2}), "");
  Problem masked = keys;
  masked.mask = {.kind = MaskKind::boolean};
  EXPECT_EQ(refusal(masked, given), "key_lengths was given with a mask; allowed: a causal corner and a window");
  Problem both = keys;
  both.packed = {16, 16};
  EXPECT_EQ(refusal(both, given), "packed sequences and key_lengths were both given; allowed: one of them");
  Problem offset = keys;
  offset.window_left = 3;
  offset.window_offset = 1;
  EXPECT_EQ(
      refusal(offset, given),
      "key_lengths was given with window_offset, which is 1; allowed: none, as windows stand at the bottom right");
  EXPECT_THROW(static_cast<void>(plan(Operation::backward, contiguous(keys), {.strategy = Strategy::exact})), Error);
}

TEST(CpuLengths, AreNotMergedAndNotMeasured) {
  Problem packed = of_lengths();
  packed.packed = {16, 16};
  packed = contiguous(packed);
  std::vector<float> memory(4096);
  EXPECT_THROW(merge(packed, {}, memory.data(), nullptr), Error);
  const ForwardTensors tensors{memory.data(), memory.data(), memory.data(), nullptr, nullptr, memory.data()};
  EXPECT_THROW(static_cast<void>(measure(packed, {.strategy = Strategy::exact}, tensors, memory.data(), 8)), Error);
}

}  // namespace
}  // namespace distr
