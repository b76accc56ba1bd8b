// SPDX-License-Identifier: Apache-2.0
// Which queries a tile has, for any number of heads in a section; needs no GPU.
#include "cuda/rows.cuh"

#include <gtest/gtest.h>

#include <map>
#include <tuple>

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
