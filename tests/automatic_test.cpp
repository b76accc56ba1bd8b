// SPDX-License-Identifier: Apache-2.0
// What strategy `auto` takes, and what it says of it.
#include <gtest/gtest.h>

#include <utility>

#include "cpu/entries.h"
#include "distr/attention.h"

namespace distr {
namespace {

Problem square_of(std::int64_t seq, DType dtype, std::int64_t head_dim) {
  Problem problem;
  problem.dtype = dtype;
  problem.seq_q = problem.seq_k = seq;
  problem.head_dim = problem.head_dim_v = head_dim;
  return contiguous(problem);
}

Grouping automatic_of(std::int64_t group_size = 2) {
  Grouping grouping;
  grouping.strategy = Strategy::automatic;
  grouping.group_size = group_size;
  return grouping;
}

TEST(Automatic, IsExactUnlessAGroupSizeIsAskedFor) {
  const Explanation found = explain(Operation::forward, square_of(1 << 15, DType::f32, 64), Grouping{});
  EXPECT_EQ(found.grouping.strategy, Strategy::exact);
  EXPECT_EQ(found.choice, "exact, as the group size is 1 (auto approximates only where a larger one is asked for)");
}

TEST(Automatic, IsExactWithASlidingWindow) {
  Problem problem = square_of(1 << 15, DType::f32, 64);
  problem.window_left = 4095;
  const Explanation found = explain(Operation::forward, problem, automatic_of());
  EXPECT_EQ(found.grouping.strategy, Strategy::exact);
  EXPECT_EQ(found.choice, "exact, as there is a sliding window, with which no approximation was measured");
  problem.window_left = 1 << 15;  // hides nothing
  EXPECT_EQ(explain(Operation::forward, problem, automatic_of()).grouping.strategy, Strategy::energy);
}

TEST(Automatic, IsExactWithCappedScores) {
  Problem problem = square_of(1 << 15, DType::f32, 64);
  problem.softcap = 50;
  const Explanation found = explain(Operation::forward, problem, automatic_of());
  EXPECT_EQ(found.grouping.strategy, Strategy::exact);
  EXPECT_EQ(found.choice, "exact, as no approximation has been measured with capped scores");
}

TEST(Automatic, IsExactWhereNothingElsePays) {
  const Grouping automatic = automatic_of();
  const auto strategy = [&](const Problem& problem, const Grouping& grouping) {
    return explain(Operation::forward, problem, grouping).grouping.strategy;
  };
  EXPECT_EQ(strategy(square_of(16, DType::f32, 64), automatic), Strategy::exact);
  EXPECT_EQ(strategy(square_of(1 << 15, DType::f32, 64), automatic_of(1)), Strategy::exact);
  EXPECT_EQ(strategy(square_of(1 << 15, DType::f64, 64), automatic), Strategy::exact);
  EXPECT_EQ(strategy(square_of(1 << 15, DType::f32, 64), automatic), Strategy::energy);
  EXPECT_EQ(strategy(square_of(1 << 15, DType::f32, 63), automatic), Strategy::exact);
  EXPECT_EQ(strategy(square_of(2047, DType::f32, 64), automatic), Strategy::exact);
  EXPECT_EQ(strategy(square_of(2048, DType::f32, 64), automatic), Strategy::energy);
  EXPECT_EQ(strategy(square_of(1023, DType::f16, 128), automatic), Strategy::exact);
  EXPECT_EQ(strategy(square_of(1024, DType::f16, 128), automatic), Strategy::energy);
  // Where AMX multiplies bf16, an approximation shrinks too little of the time.
  const bool in_tiles = cpu::products_of_bf16() == cpu::Products::of_pairs_in_tiles;
  for (const auto& [dim, from] : {std::pair<std::int64_t, std::int64_t>{64, 2048}, {128, 1024}}) {
    EXPECT_EQ(strategy(square_of(from - 1, DType::bf16, dim), automatic), Strategy::exact);
    EXPECT_EQ(strategy(square_of(from, DType::bf16, dim), automatic), in_tiles ? Strategy::exact : Strategy::energy);
  }
  Problem decode = square_of(1 << 15, DType::f32, 64);
  decode.seq_q = 1;
  EXPECT_EQ(strategy(decode, automatic), Strategy::exact);
  const auto choice = [&](const Problem& problem) { return explain(Operation::forward, problem, automatic).choice; };
  EXPECT_EQ(choice(square_of(16, DType::f32, 64)),
            "exact, as 16 rows or keys are too few for an approximation to pay (from 2048 on it does)");
  EXPECT_EQ(choice(square_of(1 << 15, DType::f32, 32)),
            "exact, as heads of head_dim 32 lose too much to an approximation (from 64 on it can pay)");
  EXPECT_EQ(choice(square_of(2048, DType::f32, 64)), "energy, which pays from 2048 rows and keys on, and errs least");
  EXPECT_EQ(explain(Operation::forward, square_of(2048, DType::f32, 64), automatic_of(4)).grouping.group_size, 4);
  Grouping short_blocks = automatic;
  short_blocks.block = 1;
  EXPECT_EQ(strategy(square_of(1 << 15, DType::f32, 64), short_blocks), Strategy::exact);
  Problem wide_values = square_of(1 << 15, DType::f32, 64);
  wide_values.head_dim_v = 300;
  EXPECT_EQ(strategy(wide_values, automatic), Strategy::exact);
}

TEST(Automatic, LeavesNarrowHeadsWithNearKeysExactWhereBf16IsMultipliedAsItIs) {
  Grouping near = automatic_of();
  near.window = 512;
  const auto choice = [&](std::int64_t head_dim) {
    return explain(Operation::forward, square_of(1 << 15, DType::bf16, head_dim), near).choice;
  };
  const cpu::Products products = cpu::products_of_bf16();
  if (products == cpu::Products::of_pairs_in_tiles) {
    EXPECT_EQ(choice(64), "exact, as an approximation was never measured to pay in bf16 where AMX multiplies");
    EXPECT_EQ(choice(128), choice(64));
    return;
  }
  const bool takes_pairs = products == cpu::Products::of_pairs;
  EXPECT_EQ(choice(64).rfind(takes_pairs ? "exact, as in bf16 an approximation with near keys" : "energy", 0), 0U);
  EXPECT_EQ(choice(128).rfind("energy", 0), 0U);
}

TEST(Automatic, CountsNearKeys) {
  Grouping near = automatic_of();
  near.window = 512;
  near.sinks = 128;
  const auto choice = [&](std::int64_t seq, Causal causal, Device device = Device::cpu) {
    Problem problem = square_of(seq, DType::f16, 64);
    problem.causal = causal;
    return explain(Operation::forward, problem, near, device).choice;
  };
  // Of the 32 x 32 tiles 295 are near: for most blocks nine of the window and the sinks'. Causal rows see 528 and have
  // 177 that are near, for most blocks five and one.
  EXPECT_EQ(choice(4096, Causal::none),
            "exact, as 29 % of the scores are of near keys, which are exact (up to 20 % an approximation of the others "
            "can pay)");
  EXPECT_EQ(
      choice(8192, Causal::none),
      "energy, which pays from 2048 rows and keys on, and errs least; near keys, up to 512 from a block's rows and "
      "the first 128, are exact");
  EXPECT_EQ(choice(4096, Causal::top_left).rfind("exact, as 34 % of the scores are of near keys", 0), 0U);
  EXPECT_EQ(choice(8192, Causal::top_left).rfind("energy, which pays from 2048 rows and keys on", 0), 0U);
  EXPECT_EQ(choice(1024, Causal::none).rfind("exact, as 1024 rows or keys are too few", 0), 0U);
  const std::string of_gpu =
      "exact, as on a GPU an approximation with near keys is less than 1.15 times as quick as exact attention";
  EXPECT_EQ(choice(1 << 15, Causal::none, Device::cuda).rfind(of_gpu, 0), 0U);
  near.skip = 0.0025;
  EXPECT_EQ(choice(1 << 15, Causal::none, Device::cuda).rfind(of_gpu, 0), 0U);
  EXPECT_EQ(choice(4096, Causal::none).rfind("exact, as 29 %", 0), 0U);
  near.window.reset();
  near.sinks = 4096;  // half of the keys, and of those that causal rows see more
  EXPECT_EQ(choice(8192, Causal::none).rfind("exact, as 50 % of the scores", 0), 0U);
  EXPECT_EQ(choice(8192, Causal::top_left).rfind("exact, as 75 % of the scores", 0), 0U);
}

// Without a GPU it says what holds for those that have no kernel of their own for exact attention.
TEST(Automatic, KnowsWhatPaysOnCuda) {
  const auto choice = [](const Problem& problem, std::int64_t group_size = 2, std::int64_t block = 128) {
    Grouping automatic = automatic_of(group_size);
    automatic.block = block;
    const Explanation explanation = explain(Operation::forward, problem, automatic, Device::cuda);
    EXPECT_EQ(explanation.choice.rfind("energy", 0) == 0, explanation.grouping.strategy == Strategy::energy);
    return explanation.choice;
  };
  const std::string energy = "energy, which pays from 8192 rows and keys on, and errs least";
  EXPECT_EQ(choice(square_of(8192, DType::bf16, 64)), energy);
  EXPECT_EQ(choice(square_of(8192, DType::f16, 96)), energy);
  EXPECT_EQ(choice(square_of(8192, DType::bf16, 128)), energy);
  EXPECT_EQ(choice(square_of(8192, DType::bf16, 64), 2, 256), energy);
  EXPECT_EQ(choice(square_of(8192, DType::bf16, 64), 2, 9000), energy);
  EXPECT_EQ(choice(square_of(8192, DType::bf16, 64), 1),
            "exact, as the group size is 1 (auto approximates only where a larger one is asked for)");
  EXPECT_EQ(choice(square_of(8191, DType::bf16, 64)),
            "exact, as 8191 rows or keys are too few for an approximation to pay (from 8192 on it does)");
  EXPECT_EQ(choice(square_of(8191, DType::bf16, 128)),
            "exact, as 8191 rows or keys are too few for an approximation to pay (from 8192 on it does)");
  EXPECT_EQ(choice(square_of(1 << 15, DType::bf16, 32)),
            "exact, as heads of head_dim 32 lose too much to an approximation (from 64 on it can pay)");
  EXPECT_EQ(choice(square_of(1 << 15, DType::f32, 64)),
            "exact, as on a GPU no approximation has been measured in other types than f16 and bf16");
  EXPECT_EQ(choice(square_of(1 << 15, DType::bf16, 300)),
            "exact, as on a GPU no approximation has been measured for a head_dim or head_dim_v above 256");
  Problem masked = square_of(1 << 15, DType::bf16, 64);
  masked.mask = {MaskKind::boolean, DType::f32, 2, {1, 1 << 15}, {0, 1}};
  EXPECT_EQ(choice(masked), "exact, as on a GPU no approximation has been measured with a mask tensor");
  EXPECT_EQ(choice(square_of(1 << 15, DType::bf16, 64), 2, 192),
            "exact, as on a GPU an approximation pays for blocks that 128 divides, and 192 is none");
}

}  // namespace
}  // namespace distr
