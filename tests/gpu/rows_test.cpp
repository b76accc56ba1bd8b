// SPDX-License-Identifier: Apache-2.0
// Which queries a tile has, for any number of heads in a section; needs no GPU.
#include "cuda/rows.cuh"

#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <utility>

namespace distr::cuda {
namespace {

Tiles tiles_of(int section) {
  DeviceProblem problem{};
  problem.batch = 3;
  problem.heads_q = 4;
  problem.heads_kv = 2;
  return {problem, section, 64, 400, 64};  // 6 tiles of a head
}

TEST(Rows, AreEveryTileOfEveryHeadOnce) {
  for (int section = 1; section <= 12; ++section) {
    std::map<std::tuple<int, int, int>, int> seen;
    const Tiles tiles = tiles_of(section);
    ASSERT_EQ(tiles.count(), 72U);
    for (unsigned index = 0; index < 72; ++index) {
      const Rows rows = tiles.at(index);
      ASSERT_LT(rows.batch, 3);
      ASSERT_LT(rows.head, 4);
      ASSERT_EQ(rows.head_kv, rows.head / 2);
      ASSERT_EQ((rows.row - 64) % 64, 0);
      ASSERT_GE(rows.row, 64);
      ASSERT_LT(rows.row, 400);
      ASSERT_EQ(++seen[std::tuple(rows.batch, rows.head, rows.row)], 1) << "section " << section;
    }
  }
}

TEST(Rows, KnowTheHeadsOfTheirKeys) {
  for (const auto& [heads_q, heads_kv] : {std::pair{6, 6}, std::pair{6, 3}, std::pair{6, 1}, std::pair{1, 1}}) {
    DeviceProblem problem{};
    problem.batch = 2;
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    const Tiles tiles(problem, 4, 0, 500, 192);  // 3 tiles of a head, the last of 116 rows
    ASSERT_EQ(tiles.count(), static_cast<unsigned>(2 * heads_q * 3));
    for (unsigned index = 0; index < tiles.count(); ++index) {
      const Rows rows = tiles.at(index);
      ASSERT_EQ(rows.head_kv, rows.head / (heads_q / heads_kv)) << heads_q << " heads, " << heads_kv << " of keys";
      ASSERT_EQ(rows.row % 192, 0);
      ASSERT_LT(rows.row, 500);
    }
  }
}

TEST(Rows, CountUpTo31Bits) {
  DeviceProblem problem{};
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  const Tiles tiles(problem, 1, 0, 0x7FFFFFFF, 1);
  EXPECT_EQ(tiles.at(0).row, 0x7FFFFFFE);
  EXPECT_EQ(tiles.at(0x7FFFFFFE).row, 0);
}

TEST(Rows, GoThroughOneSectionAfterTheOtherLastRowsFirst) {
  const Tiles tiles = tiles_of(5);  // 12 heads: 2, 5 and 5
  EXPECT_EQ(tiles.at(0).row, 64 + 5 * 64);
  EXPECT_EQ(tiles.at(11).row, 64);
  for (unsigned index = 0; index < 72; ++index) {
    const Rows rows = tiles.at(index);
    const int head = rows.batch * 4 + rows.head;
    EXPECT_EQ(head < 2 ? 0 : head < 7 ? 1 : 2, index < 12 ? 0 : index < 42 ? 1 : 2) << "tile " << index;
  }
}

}  // namespace
}  // namespace distr::cuda
