// SPDX-License-Identifier: Apache-2.0
// The tiles of a block of queries that skips far keys as it goes: each comes once for the rows that it is near to, and
// once for those that it is far from, against what the host says of each row and tile (method, 8).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>

#include "cuda/sm90/voted_tiles.cuh"

namespace distr::cuda::sm90 {
namespace {

constexpr std::int64_t kFar = 100000;

Problem problem_of(std::int64_t seq_q, std::int64_t seq_k, Causal causal, std::optional<std::int64_t> sliding) {
  Problem problem;
  problem.dtype = DType::bf16;
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.seq_q = seq_q;
  problem.seq_k = seq_k;
  problem.head_dim = problem.head_dim_v = 64;
  problem.causal = causal;
  problem.window_left = sliding;
  return problem;
}

template <int kConsumers>
void check_block(const Problem& problem, const Grouping& grouping, int first_row, std::int64_t row_end) {
  ForwardParameters parameters{};
  parameters.problem = device_problem(problem, grouping);
  parameters.row_end = row_end;
  VotedTiles<kConsumers> tiles;
  tiles.fill(parameters, {0, 0, 0, first_row});

  std::set<int> taken[2][kConsumers];  // far and near
  int count = 0;
  tiles.for_each([&](int n, int tile) {
    ASSERT_EQ(n, count++);
    const bool is_near = n < tiles.count_near();
    const std::int64_t key = tile * common::kNearTile;
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const VotedTile described = tiles.described(n, tile);
      ASSERT_EQ(described.first_key(), key);
      if (n >= tiles.count_special() || described.is_taken_by(consumer)) {
        ASSERT_TRUE(taken[is_near ? 1 : 0][consumer].insert(tile).second) << "tile " << tile << " comes twice";
      }
      for (int i = 0; i < 64; ++i) {
        const std::int64_t row = first_row + 64 * consumer + i;
        const auto seen = common::visible_keys(problem, std::min(row, row_end - 1));
        const bool sees_all = row < row_end && seen.first <= key && key + common::kNearTile <= seen.end;
        ASSERT_TRUE(sees_all || (described.has_mask() && n < tiles.count_special())) << "row " << row;
      }
    }
  });
  ASSERT_EQ(count, tiles.count());
  ASSERT_EQ(tiles.count_special() > tiles.count_near(), count > tiles.count_near());
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    for (std::int64_t row = first_row + 64 * consumer;
         row < std::min<std::int64_t>(row_end, first_row + 64 * (consumer + 1)); ++row) {
      const common::NearTiles near = common::near_tiles(problem, grouping, row);
      const auto seen = common::visible_keys(problem, row);
      for (std::int64_t tile = seen.first / common::kNearTile; tile * common::kNearTile < seen.end; ++tile) {
        const bool is_near = near.has(tile);
        ASSERT_TRUE(taken[is_near ? 1 : 0][consumer].contains(static_cast<int>(tile)))
            << "row " << row << " misses tile " << tile;
        ASSERT_FALSE(taken[is_near ? 0 : 1][consumer].contains(static_cast<int>(tile)))
            << "row " << row << " has tile " << tile << " among those that are " << (is_near ? "far" : "near");
      }
    }
  }
}

// All blocks of the rows before row_end.
template <int kConsumers>
void check_rows(const Problem& problem, const Grouping& grouping, std::int64_t row_end) {
  for (int row = 0; row < row_end; row += 64 * kConsumers) {
    check_block<kConsumers>(problem, grouping, row, row_end);
    if (testing::Test::HasFatalFailure()) {
      FAIL() << kConsumers << " consumers, rows from " << row << " of " << row_end << ", " << problem.seq_k
             << " keys, causal " << static_cast<int>(problem.causal) << ", sliding window "
             << problem.window_left.value_or(-1) << ", window " << grouping.window.value_or(-1) << ", sinks "
             << grouping.sinks << ", block " << grouping.block;
    }
  }
}

template <int kConsumers>
void check_all() {
  for (const auto& [seq_q, seq_k] : {std::pair{700, 900}, {300, 1300}, {64, 640}, {513, 513}}) {
    for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      for (const auto& sliding : {std::optional<std::int64_t>{}, {200}}) {
        const Problem problem = problem_of(seq_q, seq_k, causal, sliding);
        Grouping grouping;
        grouping.skip = 0.0025;
        for (const auto& window : {std::optional<std::int64_t>{}, {0}, {1}, {129}, {400}, {kFar}}) {
          grouping.window = window;
          for (const std::int64_t sinks : {std::int64_t{0}, std::int64_t{129}, kFar}) {
            grouping.sinks = sinks;
            for (const std::int64_t block : {128, 256, 384}) {
              grouping.block = block;
              check_rows<kConsumers>(problem, grouping, seq_q);
              check_rows<kConsumers>(problem, grouping, std::min(block, problem.seq_q));
            }
          }
        }
      }
    }
  }
}

TEST(VotedTiles, TakeEachTileOnceForTheRowsThatItIsNearOrFar) {
  check_all<2>();
  check_all<3>();
}

}  // namespace
}  // namespace distr::cuda::sm90
