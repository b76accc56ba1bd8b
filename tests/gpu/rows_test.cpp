// SPDX-License-Identifier: Apache-2.0
// Which queries a tile has, for any number of heads in a section; needs no GPU.
#include "cuda/rows.cuh"

#include <gtest/gtest.h>

#include <map>
#include <tuple>

namespace distr::cuda {
namespace {

struct Parameters {
  DeviceProblem problem;
  int section;
  std::int64_t row_begin, row_end;
};

Parameters parameters(int section) {
  Parameters p{};
  p.problem.batch = 3;
  p.problem.heads_q = 4;
  p.problem.heads_kv = 2;
  p.section = section;
  p.row_begin = 64;
  p.row_end = 400;  // 6 tiles of 64
  return p;
}

TEST(Rows, AreEveryTileOfEveryHeadOnce) {
  for (int section = 1; section <= 12; ++section) {
    std::map<std::tuple<int, int, int>, int> seen;
    for (unsigned index = 0; index < 72; ++index) {
      const Rows rows = Rows::of(index, 64, parameters(section));
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
  const Parameters p = parameters(5);  // 12 heads: 2, 5 and 5
  EXPECT_EQ(Rows::of(0, 64, p).row, 64 + 5 * 64);
  EXPECT_EQ(Rows::of(11, 64, p).row, 64);
  for (unsigned index = 0; index < 72; ++index) {
    const Rows rows = Rows::of(index, 64, p);
    const int head = rows.batch * 4 + rows.head;
    EXPECT_EQ(head < 2 ? 0 : head < 7 ? 1 : 2, index < 12 ? 0 : index < 42 ? 1 : 2) << "tile " << index;
  }
}

}  // namespace
}  // namespace distr::cuda
