// SPDX-License-Identifier: Apache-2.0
// How queries are shared between blocks of two and of three consumers, and which product makes grouped scores. Needs no
// GPU.
#include "cuda/sm90/heuristics.h"

#include <gtest/gtest.h>

#include <utility>

namespace distr::cuda::sm90 {
namespace {

constexpr std::int64_t kNumSms = 132;

TEST(Waves, ThreeConsumersTakeWholeWavesAndTwoTheRest) {
  const Waves waves{10, 16384, 16384, kNumSms, false};
  EXPECT_EQ(waves.rows_for_three(), 79 * 192);  // 790 of 792 blocks; 100 blocks of two consumers follow
}

TEST(Waves, OneKindTakesAllWhereItEndsSooner) {
  EXPECT_EQ((Waves{10, 1024, 1024, kNumSms, false}.rows_for_three()), 0);     // 80 blocks of 128 rows, one wave
  EXPECT_EQ((Waves{10, 2304, 2304, kNumSms, false}.rows_for_three()), 2304);  // 120 of 192 rows, or 180 of 128
}

TEST(Waves, CausalBlocksEndOneByOne) {
  EXPECT_EQ((Waves{10, 16384, 16384, kNumSms, true}.rows_for_three()), 16384);
  EXPECT_EQ((Waves{10, 128, 128, kNumSms, true}.rows_for_three()), 0);
}

TEST(ProductOf, SkippedKeysAreThoseOfKHatWhereOneGroupingOfWideHeadsIsNotFinished) {
  Problem problem;
  problem.dtype = DType::bf16;
  problem.seq_q = 500;
  problem.seq_k = 900;
  problem.head_dim = problem.head_dim_v = 128;
  Grouping whole;
  whole.strategy = Strategy::energy;
  whole.group_size = 2;
  whole.block = 500;
  whole.window = 100;
  whole.skip = 0.01;
  EXPECT_EQ(product_of(problem, whole), Product::precomputed);
  Grouping other = whole;
  other.block = 128;
  EXPECT_EQ(product_of(problem, other), Product::spread);
  other = whole;
  other.finish = true;
  EXPECT_EQ(product_of(problem, other), Product::spread);
  problem.head_dim = 64;
  EXPECT_EQ(product_of(problem, whole), Product::spread);
  problem.head_dim = 128;
  problem.dtype = DType::f16;
  EXPECT_EQ(product_of(problem, whole), Product::precomputed);
  other = whole;
  other.skip = 0;  // near keys in fp16 have no shape for k_hat
  EXPECT_EQ(product_of(problem, other), Product::spread);
}

// As measured (docs/kernel-log.md, sm90/forward, step 32).
TEST(Waves, BlocksShareAnSmWhereSequencesAreShort) {
  for (const bool causal : {false, true}) {
    EXPECT_TRUE((Waves{64, 1024, 1024, kNumSms, causal}.is_quicker_sharing())) << causal;
    EXPECT_TRUE((Waves{64, 2048, 2048, kNumSms, causal}.is_quicker_sharing())) << causal;
    EXPECT_FALSE((Waves{10, 1024, 1024, kNumSms, causal}.is_quicker_sharing())) << causal;
    EXPECT_FALSE((Waves{10, 4096, 4096, kNumSms, causal}.is_quicker_sharing())) << causal;
    EXPECT_FALSE((Waves{10, 16384, 16384, kNumSms, causal}.is_quicker_sharing())) << causal;
  }
}

// Blocks of three are whole tiles or all rows, and no other share that was asked about costs less.
TEST(Waves, SharesAreWholeTilesAndCostTheLeast) {
  for (const std::int64_t heads : {1, 7, 64, 133}) {
    for (std::int64_t rows = 1; rows < 40000; rows = rows * 3 / 2 + 1) {
      const Waves waves{heads, rows, rows, kNumSms, false};
      const std::int64_t three = waves.rows_for_three();
      ASSERT_TRUE(three == rows || (three < rows && three % kRowsOfThree == 0)) << heads << " " << rows;
      const double cost = waves.cost(three, kRowsOfThree) + waves.cost(rows - three, kRowsOfTwo);
      EXPECT_LE(cost, waves.cost(rows, kRowsOfThree)) << heads << " " << rows;
      EXPECT_LE(cost, waves.cost(rows, kRowsOfTwo)) << heads << " " << rows;
    }
  }
}

// Of lengths that are data the mean decides and the longest; dense calls have no other kernel for few rows.
TEST(FewRows, GoToTheKernelOfSequences) {
  Problem problem;
  problem.batch = 4;
  problem.seq_q = problem.seq_k = 4096;
  problem.head_dim = 128;
  problem.packed = {4 * 63, 4 * 63};
  EXPECT_TRUE(has_few_rows(problem));
  problem.packed = {4 * 64, 4 * 64};
  EXPECT_FALSE(has_few_rows(problem));
  problem.head_dim = 64;
  EXPECT_TRUE(has_few_rows(problem));
  problem.packed = {4 * 384, 4 * 384};
  EXPECT_FALSE(has_few_rows(problem));
  problem.seq_q = problem.seq_k = 512;
  EXPECT_FALSE(has_few_rows(problem));
  problem.causal = Causal::bottom_right;
  EXPECT_TRUE(has_few_rows(problem));
  problem.seq_k = 513;
  EXPECT_FALSE(has_few_rows(problem));
  problem.packed.reset();
  problem.key_lengths = true;
  EXPECT_FALSE(has_few_rows(problem));
  problem.seq_q = 1;
  EXPECT_TRUE(has_few_rows(problem));
  problem.key_lengths = false;
  EXPECT_FALSE(has_few_rows(problem));
}

// Blocks of 128 keys, tiles of 64 queries.
TEST(LastRound, IsSplitWhereItHasBlocksForFewSms) {
  const auto split = [](std::int64_t blocks, std::int64_t tiles) {
    const LastRound last = split_of_last_round(blocks, tiles, kNumSms);
    return std::pair(last.first, last.pieces);
  };
  EXPECT_EQ(split(62 * 132 + 8, 512), std::pair(std::int64_t{62 * 132}, std::int64_t{16}));
  EXPECT_EQ(split(2 * 132 + 56, 64), std::pair(std::int64_t{2 * 132}, std::int64_t{2}));
  EXPECT_EQ(split(132 + 67, 64), std::pair(std::int64_t{132 + 67}, std::int64_t{1}));  // a second SM for some alone
  EXPECT_EQ(split(2 * 132, 64), std::pair(std::int64_t{2 * 132}, std::int64_t{1}));
  EXPECT_EQ(split(4, 1000), std::pair(std::int64_t{0}, std::int64_t{33}));
  EXPECT_EQ(split(4, 17), std::pair(std::int64_t{0}, std::int64_t{2}));
  EXPECT_EQ(split(4, 15), std::pair(std::int64_t{4}, std::int64_t{1}));
  EXPECT_EQ(split(0, 15), std::pair(std::int64_t{0}, std::int64_t{1}));
}

TEST(Sinks, AreSplitForAllSms) {
  EXPECT_EQ(pieces_of_sinks(10, 256, kNumSms), 13);
  EXPECT_EQ(pieces_of_sinks(64, 256, kNumSms), 2);
  EXPECT_EQ(pieces_of_sinks(1, 256, kNumSms), 32);  // of at least eight tiles of queries
  EXPECT_EQ(pieces_of_sinks(10, 15, kNumSms), 1);
  EXPECT_EQ(pieces_of_sinks(133, 256, kNumSms), 1);
  EXPECT_EQ(pieces_of_sinks(0, 256, kNumSms), 1);
}

TEST(ShortSequences, GoToThePortableBackwardWhereItTakesThem) {
  Problem problem;
  problem.dtype = DType::bf16;
  problem.seq_q = problem.seq_k = 512;
  problem.head_dim = 128;
  problem.heads_q = 4;
  problem.causal = Causal::bottom_right;
  EXPECT_FALSE(has_short_sequences(problem));  // not packed
  problem.packed = {4 * 500, 4 * 500};
  EXPECT_TRUE(has_short_sequences(problem));
  problem.seq_q = 513;
  EXPECT_FALSE(has_short_sequences(problem));
  problem.seq_q = 512;
  problem.head_dim = 64;
  EXPECT_FALSE(has_short_sequences(problem));
  problem.seq_q = problem.seq_k = 256;
  EXPECT_TRUE(has_short_sequences(problem));
  problem.causal = Causal::none;
  EXPECT_FALSE(has_short_sequences(problem));
  problem.seq_q = problem.seq_k = 128;
  EXPECT_TRUE(has_short_sequences(problem));
  problem.heads_kv = 4;
  EXPECT_FALSE(has_short_sequences(problem));
  problem.seq_q = problem.seq_k = 64;
  EXPECT_TRUE(has_short_sequences(problem));
  problem.softcap = 30;
  EXPECT_FALSE(has_short_sequences(problem));
  problem.softcap = 0;
  problem.window_left = 100;
  EXPECT_FALSE(has_short_sequences(problem));
  problem.window_left.reset();
  problem.dtype = DType::f16;
  EXPECT_FALSE(has_short_sequences(problem));
}

}  // namespace
}  // namespace distr::cuda::sm90
