// SPDX-License-Identifier: Apache-2.0
// Which queries a tile has, in which order tiles are taken; needs no GPU.
#include "cuda/tile_scheduler.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "cuda/heuristics.h"

namespace distr::cuda {
namespace {

TileScheduler tiles_of(int interleaved) {
  DeviceProblem problem{};
  problem.batch = 3;
  problem.heads_q = 4;
  problem.heads_kv = 2;
  return {problem, interleaved, 64, 400, 64};  // 12 heads, 6 tiles each
}

TEST(TileScheduler, AreEveryTileOfEveryHeadOnce) {
  for (int interleaved = 0; interleaved <= 12; ++interleaved) {
    std::map<std::tuple<int, int, int>, int> seen;
    const TileScheduler tiles = tiles_of(interleaved);
    ASSERT_EQ(tiles.count(), 72U);
    for (unsigned index = 0; index < 72; ++index) {
      const WorkTile tile = tiles.at(index);
      ASSERT_LT(tile.batch, 3);
      ASSERT_LT(tile.head, 4);
      ASSERT_EQ(tile.head_kv, tile.head / 2);
      ASSERT_EQ((tile.row - 64) % 64, 0);
      ASSERT_GE(tile.row, 64);
      ASSERT_LT(tile.row, 400);
      ASSERT_EQ(++seen[std::tuple(tile.batch, tile.head, tile.row)], 1) << interleaved << " interleaved";
    }
  }
}

TEST(TileScheduler, KnowTheHeadsOfTheirKeys) {
  for (const auto& [heads_q, heads_kv] : {std::pair{6, 6}, std::pair{6, 3}, std::pair{6, 1}, std::pair{1, 1}}) {
    DeviceProblem problem{};
    problem.batch = 2;
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    const TileScheduler tiles(problem, std::min(4, 2 * heads_q), 0, 500,
                              192);  // 3 tiles of a head, the last of 116 rows
    ASSERT_EQ(tiles.count(), static_cast<unsigned>(2 * heads_q * 3));
    for (unsigned index = 0; index < tiles.count(); ++index) {
      const WorkTile tile = tiles.at(index);
      ASSERT_EQ(tile.head_kv, tile.head / (heads_q / heads_kv)) << heads_q << " heads, " << heads_kv << " of keys";
      ASSERT_EQ(tile.row % 192, 0);
      ASSERT_LT(tile.row, 500);
    }
  }
}

TEST(TileScheduler, AreNoneWhereThereAreNone) {
  DeviceProblem problem{};
  problem.batch = problem.heads_q = problem.heads_kv = 2;
  EXPECT_EQ(TileScheduler(problem, 0, 64, 64, 64).count(), 0U);
}

TEST(TileScheduler, CountUpTo31Bits) {
  DeviceProblem problem{};
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  for (int interleaved = 0; interleaved <= 1; ++interleaved) {
    const TileScheduler tiles(problem, interleaved, 0, 0x7FFFFFFF, 1);
    EXPECT_EQ(tiles.at(0).row, 0x7FFFFFFE);
    EXPECT_EQ(tiles.at(0x7FFFFFFE).row, 0);
  }
}

TEST(TileScheduler, GoThroughHeadAfterHeadThenTheLastInterleaved) {
  const TileScheduler tiles = tiles_of(5);  // 7 heads before them
  for (unsigned index = 0; index < 72; ++index) {
    const WorkTile tile = tiles.at(index);
    const bool is_before = index < 42;
    const unsigned head = is_before ? index / 6 : 7 + (index - 42) % 5;
    const unsigned in_head = is_before ? index % 6 : (index - 42) / 5;
    EXPECT_EQ(static_cast<unsigned>(tile.batch * 4 + tile.head), head) << "tile " << index;
    EXPECT_EQ(tile.row, 64 + (5 - static_cast<int>(in_head)) * 64) << "tile " << index;
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

TEST(TileScheduler, AreTakenHeadAfterHeadWhereAllAreOfOneLength) {
  EXPECT_EQ(interleaved_heads(problem_of(32, 1024, 128, Causal::none), 8, 132), 0);
}

TEST(TileScheduler, HaveAnEvenEndWhereTheyAreCausal) {
  // Heads of 1 MiB and 16 tiles: 24 fit the cache, 25 have three tiles for each of 132 blocks.
  EXPECT_EQ(interleaved_heads(problem_of(32, 2048, 128, Causal::top_left), 16, 132), 25);
  EXPECT_EQ(interleaved_heads(problem_of(32, 2048, 128, Causal::bottom_right), 16, 40), 24);
  EXPECT_EQ(interleaved_heads(problem_of(5, 2048, 128, Causal::top_left), 16, 132), 10);  // all there are
  EXPECT_EQ(interleaved_heads(problem_of(32, 65536, 128, Causal::top_left), 512, 132), 1);
  Problem unequal = problem_of(32, 2048, 64, Causal::top_left);
  unequal.seq_k = 4096;
  unequal.head_dim_v = 192;  // 2 MiB a head
  EXPECT_EQ(interleaved_heads(unequal, 16, 40), 12);
}

}  // namespace
}  // namespace distr::cuda
