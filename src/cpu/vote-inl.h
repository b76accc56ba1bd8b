// SPDX-License-Identifier: Apache-2.0
// Which halves of a tile of keys 64 rows skip (method, 8). This file is included once for each instruction set.
#if defined(DISTR_CPU_VOTE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_VOTE_INL_H_
#undef DISTR_CPU_VOTE_INL_H_
#else
#define DISTR_CPU_VOTE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "common/near.h"
#include "cpu/softmax-inl.h"
#include "cpu/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whether some score is above the bound, or NaN. `count` is a multiple of the vector length.
inline bool any_above(const float* scores, std::int64_t count, float bound) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  const auto bounds = hn::Set(tag, bound);
  auto below = hn::Eq(bounds, bounds);  // true: a bound is no NaN
  for (std::int64_t j = 0; j < count; j += lanes) {
    below = hn::And(below, hn::Le(hn::LoadU(tag, scores + j), bounds));
  }
  return !hn::AllTrue(tag, below);
}

// Keys of a tile: [first, first + keys), `padded` with the hidden scores behind them.
struct KeyRange {
  std::int64_t first, keys, padded;
};

// The halves of a tile of keys, 64 each, that rows see and keep.
struct Halves {
  static constexpr std::int64_t kCount = kTileKeys / common::kSkipKeys;
  std::array<bool, kCount> seen{};
  std::array<bool, kCount> kept{};

  // Takes one row's scores into account.
  void add(const float* scores, std::int64_t padded_keys, float bound) {
    for (std::size_t half = 0; half < kCount; ++half) {
      const std::int64_t first = static_cast<std::int64_t>(half) * common::kSkipKeys;
      const std::int64_t count = std::clamp<std::int64_t>(padded_keys - first, 0, common::kSkipKeys);
      seen[half] = seen[half] || any_above(scores + first, count, kHidden);
      kept[half] = kept[half] || any_above(scores + first, count, bound);
    }
  }

  [[nodiscard]] bool any_kept() const { return kept[0] || kept[1]; }

  // The keys that are kept: a half, or all.
  [[nodiscard]] KeyRange range(std::int64_t keys, std::int64_t padded_keys) const {
    const std::int64_t first = kept[0] ? 0 : common::kSkipKeys;
    const std::int64_t end = kept[1] ? kTileKeys : common::kSkipKeys;
    return {first, std::min(end, keys) - first, std::min(end, padded_keys) - first};
  }
};

// What a tile of queries skips by, and how much it kept.
struct Votes {
  std::array<float, kTaskQueries> dropped{};  // of a row: what all its far scores lack, in their unit
  std::array<float, kTaskQueries> bounds{};   // what a far score of the row must exceed
  std::array<std::int32_t, 2 * kTaskQueries / common::kSkipRows> counts{};  // of halves that 64 rows keep, and see

  // L + ln p, where L is the log-sum-exp of the row's near scores. Any score that is seen exceeds the bound where the
  // row sees no near key, and where the bound is NaN.
  void find_bound(std::int64_t row, const RowState& near, double to_natural, double skip) {
    const auto n = static_cast<std::size_t>(row);
    const double bound = static_cast<double>(near.maximum) +
                         (std::log(static_cast<double>(near.sum)) + std::log(skip)) / to_natural -
                         static_cast<double>(dropped[n]);
    bounds[n] = near.sum == 0 || std::isnan(bound) ? kHidden : static_cast<float>(bound);
  }

  void count(const Halves& halves, std::int64_t group) {
    for (std::size_t half = 0; half < Halves::kCount; ++half) {
      counts[static_cast<std::size_t>(2 * group)] += halves.kept[half] ? 1 : 0;
      counts[static_cast<std::size_t>(2 * group + 1)] += halves.seen[half] ? 1 : 0;
    }
  }

  // `target`: ForwardTensors::halves.
  void write(const Problem& problem, const QueryTile& tile, std::int32_t* target) const {
    const std::int64_t head = tile.b * problem.heads_q + tile.h;
    const std::int64_t at = head * common::num_skip_rows(problem) + tile.first / common::kSkipRows;
    std::copy_n(counts.data(), 2 * common::ceil_div(tile.rows, common::kSkipRows), target + 2 * at);
  }
};

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
