// SPDX-License-Identifier: Apache-2.0
// Which rows a tile of keys is near to, and its place among the near and far tiles of a row, against what the host says
// of each row and tile (method, 8).
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "cuda/near.cuh"

namespace distr::cuda {
namespace {

constexpr std::int64_t kFar = 100000;

struct Setting {
  std::int64_t seq_q, seq_k, block;
  std::optional<std::int64_t> window;
  std::int64_t sinks;
  std::optional<std::int64_t> key_offset;
  std::optional<Part> part;
  std::optional<std::int64_t> sliding = std::nullopt;  // window_left
};

constexpr std::int64_t kSizes[][2] = {{1, 1}, {1, 700}, {700, 1}, {300, 700}, {700, 300}, {512, 512}, {129, 641}};
constexpr std::optional<std::int64_t> kWindows[] = {std::nullopt, 0, 1, 127, 128, 129, 400, kFar};

void check(const Setting& setting) {
  Problem problem;
  problem.dtype = DType::bf16;
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.seq_q = setting.seq_q;
  problem.seq_k = setting.seq_k;
  problem.head_dim = problem.head_dim_v = 64;
  Grouping grouping;
  grouping.strategy = Strategy::energy;
  grouping.group_size = 2;
  grouping.block = setting.block;
  grouping.window = setting.window;
  grouping.sinks = setting.sinks;
  grouping.key_offset = setting.key_offset;
  grouping.part = setting.part;
  problem.window_left = setting.sliding;
  problem.window_offset = setting.key_offset;
  const DeviceProblem sizes = device_problem(problem, grouping);
  const auto tiles = static_cast<int>((problem.seq_k + common::kNearTile - 1) / common::kNearTile);
  for (std::int64_t row = 0; row < problem.seq_q; ++row) {
    const common::NearTiles wanted = common::near_tiles(problem, grouping, row);
    const NearTiles of_row = near_tiles(sizes, row, problem.seq_k);
    int near = 0;
    int far = 0;
    int in_order = 0;  // near tiles from the smallest on
    const auto first_seen = static_cast<int>(common::visible_keys(problem, row).first / common::kNearTile);
    int sinks = of_row.last - of_row.first;  // come behind the window's
    for (int tile = 0; tile < tiles; ++tile) {
      const NearRows rows = near_rows(sizes, tile);
      ASSERT_EQ(row >= rows.first && row < rows.last, wanted.has(tile))
          << "row " << row << " of " << problem.seq_q << ", tile " << tile << " of " << problem.seq_k << " keys, block "
          << setting.block << ", window " << setting.window.value_or(-1) << ", sinks " << setting.sinks << ", offset "
          << setting.key_offset.value_or(0);
      if (tile < first_seen) {
        ASSERT_FALSE(of_row.has(tile));
        continue;
      }
      ASSERT_EQ(of_row.has(tile), wanted.has(tile));
      int& before = !wanted.has(tile) ? far : tile < of_row.sinks ? sinks : near;
      ASSERT_EQ(wanted.has(tile) ? of_row.near_before(tile) : of_row.far_before(tile), before);
      ASSERT_EQ(wanted.has(tile) ? of_row.near(in_order++) : of_row.far(far), tile);
      ++before;
    }
    ASSERT_EQ(of_row.near_count(), in_order);
    ASSERT_EQ(of_row.far_count(), far);
  }
}

TEST(NearRows, AreTheRowsThatHaveTheTile) {
  for (const auto& [seq_q, seq_k] : kSizes) {
    for (const std::int64_t block : {std::int64_t{128}, std::int64_t{256}, std::int64_t{1000}, kFar}) {
      for (const auto& window : kWindows) {
        for (const std::int64_t sinks : {std::int64_t{0}, std::int64_t{1}, std::int64_t{129}, kFar}) {
          for (const std::int64_t offset : {std::int64_t{0}, std::int64_t{-300}, std::int64_t{250}, -kFar, kFar}) {
            check({seq_q, seq_k, block, window, sinks, offset, std::nullopt});
          }
        }
      }
    }
  }
}

TEST(NearRows, AreThoseInASlidingWindow) {
  for (const auto& [seq_q, seq_k] : kSizes) {
    for (const auto& window : kWindows) {
      for (const std::int64_t sinks : {0, 129}) {
        for (const std::int64_t sliding : {0, 100, 128, 390}) {
          check({seq_q, seq_k, 128, window, sinks, 250, std::nullopt, sliding});
          check({seq_q, seq_k, kFar, window, sinks, -300, std::nullopt, sliding});
        }
      }
    }
  }
}

TEST(NearRows, AreThoseOfALongerCall) {
  for (const auto& window : kWindows) {
    for (const std::int64_t first_key : {0, 256, 1280}) {
      check({300, 700, 128, window, 129, std::nullopt, Part{512, first_key}});
      check({300, 700, 1000, window, 0, std::nullopt, Part{1000, first_key}});
    }
  }
}

}  // namespace
}  // namespace distr::cuda
