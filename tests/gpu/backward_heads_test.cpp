// SPDX-License-Identifier: Apache-2.0
// How many heads the sm_80 backward interleaves, which needs no GPU.
#include "cuda/sm80/heuristics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

namespace distr::cuda::sm80 {
namespace {

constexpr std::int64_t kResident = 2 * 132;
constexpr std::int64_t kMegabyte = std::int64_t{1} << 20;

// The time from the first thread block's start to the last one's end, of what it would be if all SMs were busy to the
// end. Blocks are causal: the first of a head takes `tiles`, the next one less. They start in the scheduler's order.
double makespan(std::int64_t heads, std::int64_t tiles, std::int64_t interleaved) {
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free;
  for (std::int64_t i = 0; i < kResident; ++i) {
    free.push(0);
  }
  std::int64_t end = 0;
  for (std::int64_t first = 0; first < heads; first += interleaved) {
    for (std::int64_t block = 0; block < tiles * std::min(interleaved, heads - first); ++block) {
      const std::int64_t done = free.top() + tiles - block / std::min(interleaved, heads - first);
      free.pop();
      free.push(done);
      end = std::max(end, done);
    }
  }
  const auto whole = static_cast<double>(heads * tiles * (tiles + 1) / 2);
  return static_cast<double>(end) * kResident / whole;
}

TEST(BackwardHeads, FewHeadsAtATimeWouldBeSlow) { EXPECT_GT(makespan(10, 128, 2), 1.19); }

TEST(BackwardHeads, TheLastHeadsLongBlocksDoNotOutlastTheOthers) {
  for (const std::int64_t heads : {7, 10, 13, 16, 21, 40}) {
    for (const std::int64_t tiles : {64, 128, 140, 192, 256}) {
      for (const std::int64_t bytes_per_head : {kMegabyte, 8 * kMegabyte, 64 * kMegabyte}) {
        if (heads * tiles >= 4 * kResident) {
          EXPECT_LE(makespan(heads, tiles, interleaved_backward_heads(heads, bytes_per_head, heads * tiles, kResident)),
                    1.09)
              << heads << " heads of " << tiles << " tiles, " << bytes_per_head << " bytes each";
        }
      }
    }
  }
}

TEST(BackwardHeads, ManyHeadsOrEqualBlocksTakeWhatTheCacheHolds) {
  EXPECT_EQ(interleaved_backward_heads(64, 4 * kMegabyte, 64 * 128, kResident), 6);
  EXPECT_EQ(interleaved_backward_heads(10, 8 * kMegabyte, 10 * 128, 0), 3);
  EXPECT_EQ(interleaved_backward_heads(10, 100 * kMegabyte, 10 * 128, 0), 1);
  EXPECT_EQ(interleaved_backward_heads(2, kMegabyte, 2 * 128, 0), 2);
}

}  // namespace
}  // namespace distr::cuda::sm80
