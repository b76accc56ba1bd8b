// SPDX-License-Identifier: Apache-2.0
// The plan of the split over keys, which needs no GPU.
#include "cuda/sm80/heuristics.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

namespace distr::cuda::sm80 {
namespace {

constexpr std::int64_t kNumSms = 132;

SplitSizes sizes_of(std::int64_t tiles, std::int64_t key_tiles, std::int64_t resident) {
  return {tiles, key_tiles, 0, kNumSms, resident, false};
}

TEST(Split, LeavesWholeWhatFillsTheDevice) {
  EXPECT_EQ(plan_split(sizes_of(264, 64, 2)).ctas(), 0);
  EXPECT_EQ(plan_split(sizes_of(0, 64, 2)).ctas(), 0);
  EXPECT_EQ(plan_split(sizes_of(1280, 256, 2)).ctas(), 0);  // the last wave is nearly full
}

TEST(Split, DividesTheLastWave) {
  const SplitKv split = plan_split(sizes_of(320, 64, 2));
  EXPECT_EQ(split.begin, 264U);
  EXPECT_EQ(split.end, 320U);
  EXPECT_EQ(split.num_splits, 4U);
}

TEST(Split, GivesOneTileToTheWholeDevice) {
  const SplitKv split = plan_split(sizes_of(1, 512, 2));
  EXPECT_EQ(split.end, 1U);
  EXPECT_GE(split.num_splits, 32U);
}

TEST(Split, DividesCausalTilesOnlyWhereAllRunAtOnce) {
  SplitSizes causal = sizes_of(320, 64, 3);
  causal.causal = true;
  causal.long_tiles = 130;
  EXPECT_EQ(plan_split(causal).end, 130U);
  EXPECT_EQ(plan_split(causal).num_splits, 2U);
  causal.resident = 2;
  EXPECT_EQ(plan_split(causal).ctas(), 0);
}

TEST(Split, TakesCausalTilesThatAreAllLongForWhatTheyAre) {
  for (const std::int64_t tiles : {140, 200, 256, 264}) {
    SplitSizes causal = sizes_of(tiles, 256, 2);
    const SplitKv split = plan_split(causal);
    causal.causal = true;
    causal.long_tiles = tiles;
    EXPECT_EQ(plan_split(causal).begin, split.begin) << tiles;
    EXPECT_EQ(plan_split(causal).num_splits, split.num_splits) << tiles;
  }
  EXPECT_EQ(plan_split(sizes_of(256, 256, 2)).ctas(), 0);
}

// Whatever the sizes are, the blocks of the launch are all splits of all tiles, each once.
TEST(Split, CoversEverySplitOnce) {
  for (const std::int64_t tiles : {1, 7, 131, 132, 133, 200, 263, 320, 396, 397, 640, 1280, 2048}) {
    for (const std::int64_t key_tiles : {1, 3, 4, 9, 64, 255, 512}) {
      for (const std::int64_t resident : {1, 2, 3, 4}) {
        for (const bool causal : {false, true}) {
          SplitSizes sizes = sizes_of(tiles, key_tiles, resident);
          sizes.causal = causal;
          sizes.long_tiles = tiles * 2 / 5;
          const SplitKv split = plan_split(sizes);
          ASSERT_LE(split.begin, split.end);
          ASSERT_LE(split.end, tiles);
          ASSERT_LE(split.num_splits, key_tiles);
          ASSERT_LE(split.ctas(), 2 * kNumSms * resident);
          std::map<std::pair<unsigned, unsigned>, int> seen;
          for (std::int64_t block = 0; block < tiles - (split.end - split.begin) + split.ctas(); ++block) {
            const SplitKv::Split part = split.at(static_cast<unsigned>(block));
            const bool divided = part.tile >= split.begin && part.tile < split.end;
            ASSERT_EQ(part.count, divided ? split.num_splits : 1U) << "block " << block;
            ASSERT_LT(part.index, part.count);
            ASSERT_LT(part.tile, tiles);
            ASSERT_EQ(++seen[std::pair(part.tile, part.index)], 1);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace distr::cuda::sm80
