// SPDX-License-Identifier: Apache-2.0
// Which queries a tile has, in which order tiles are taken; needs no GPU.
#include "cuda/rows.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "cuda/heuristics.h"

namespace distr::cuda {
namespace {

Tiles tiles_of(int together) {
  DeviceProblem problem{};
  problem.batch = 3;
  problem.heads_q = 4;
  problem.heads_kv = 2;
  return {problem, together, 64, 400, 64};  // 12 heads, 6 tiles each
}

TEST(Rows, AreEveryTileOfEveryHeadOnce) {
  for (int together = 0; together <= 12; ++together) {
    std::map<std::tuple<int, int, int>, int> seen;
    const Tiles tiles = tiles_of(together);
    ASSERT_EQ(tiles.count(), 72U);
    for (unsigned index = 0; index < 72; ++index) {
      const Rows rows = tiles.at(index);
      ASSERT_LT(rows.batch, 3);
      ASSERT_LT(rows.head, 4);
      ASSERT_EQ(rows.head_kv, rows.head / 2);
      ASSERT_EQ((rows.row - 64) % 64, 0);
      ASSERT_GE(rows.row, 64);
      ASSERT_LT(rows.row, 400);
      ASSERT_EQ(++seen[std::tuple(rows.batch, rows.head, rows.row)], 1) << together << " together";
    }
  }
}

TEST(Rows, KnowTheHeadsOfTheirKeys) {
  for (const auto& [heads_q, heads_kv] : {std::pair{6, 6}, std::pair{6, 3}, std::pair{6, 1}, std::pair{1, 1}}) {
    DeviceProblem problem{};
    problem.batch = 2;
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    const Tiles tiles(problem, std::min(4, 2 * heads_q), 0, 500, 192);  // 3 tiles of a head, the last of 116 rows
    ASSERT_EQ(tiles.count(), static_cast<unsigned>(2 * heads_q * 3));
    for (unsigned index = 0; index < tiles.count(); ++index) {
      const Rows rows = tiles.at(index);
      ASSERT_EQ(rows.head_kv, rows.head / (heads_q / heads_kv)) << heads_q << " heads, " << heads_kv << " of keys";
      ASSERT_EQ(rows.row % 192, 0);
      ASSERT_LT(rows.row, 500);
    }
  }
}

TEST(Rows, AreNoneWhereThereAreNone) {
  DeviceProblem problem{};
  problem.batch = problem.heads_q = problem.heads_kv = 2;
  EXPECT_EQ(Tiles(problem, 0, 64, 64, 64).count(), 0U);
}

TEST(Rows, CountUpTo31Bits) {
  DeviceProblem problem{};
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  for (int together = 0; together <= 1; ++together) {
    const Tiles tiles(problem, together, 0, 0x7FFFFFFF, 1);
    EXPECT_EQ(tiles.at(0).row, 0x7FFFFFFE);
    EXPECT_EQ(tiles.at(0x7FFFFFFE).row, 0);
  }
}

TEST(Rows, GoThroughHeadAfterHeadThenTheLastByTurns) {
  const Tiles tiles = tiles_of(5);  // 7 heads before them
  for (unsigned index = 0; index < 72; ++index) {
    const Rows rows = tiles.at(index);
    const bool is_before = index < 42;
    const unsigned head = is_before ? index / 6 : 7 + (index - 42) % 5;
    const unsigned turn = is_before ? index % 6 : (index - 42) / 5;
    EXPECT_EQ(static_cast<unsigned>(rows.batch * 4 + rows.head), head) << "tile " << index;
    EXPECT_EQ(rows.row, 64 + (5 - static_cast<int>(turn)) * 64) << "tile " << index;
  }
}

Problem problem_of(std::int64_t heads, std::int64_t n, std::int64_t d, Causal causal) {
  Problem problem;
  problem.batch = 2;
  problem.heads_q = problem.heads_kv = heads;
  problem.seq_q = problem.seq_k = n;
  problem.head_dim = problem.head_dim_v = d;
  problem.causal = causal;
  return problem;
}

TEST(Rows, AreTakenHeadAfterHeadWhereAllAreOfOneLength) {
  EXPECT_EQ(heads_together(problem_of(32, 1024, 128, Causal::none), 8, 132), 0);
}

TEST(Rows, HaveAnEvenEndWhereTheyAreCausal) {
  // Heads of 1 MiB and 16 tiles: 24 fit the cache, 25 have three tiles for each of 132 blocks.
  EXPECT_EQ(heads_together(problem_of(32, 2048, 128, Causal::top_left), 16, 132), 25);
  EXPECT_EQ(heads_together(problem_of(32, 2048, 128, Causal::bottom_right), 16, 40), 24);
  EXPECT_EQ(heads_together(problem_of(5, 2048, 128, Causal::top_left), 16, 132), 10);  // all there are
  EXPECT_EQ(heads_together(problem_of(32, 65536, 128, Causal::top_left), 512, 132), 1);
  Problem unequal = problem_of(32, 2048, 64, Causal::top_left);
  unequal.seq_k = 4096;
  unequal.head_dim_v = 192;  // 2 MiB a head
  EXPECT_EQ(heads_together(unequal, 16, 40), 12);
}

}  // namespace
}  // namespace distr::cuda
