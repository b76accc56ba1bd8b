// SPDX-License-Identifier: Apache-2.0
// The functions of segment-inl.h for pairs of bf16, where AVX512_BF16 may be there: kept columns are as they were,
// means and sums of columns are taken in floats and rounded once. This file is included once for each instruction set.
#if defined(DISTR_CPU_PAIR_SEGMENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_PAIR_SEGMENT_INL_H_
#undef DISTR_CPU_PAIR_SEGMENT_INL_H_
#else
#define DISTR_CPU_PAIR_SEGMENT_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "cpu/pair_tile-inl.h"
#include "cpu/segment-inl.h"

#if DISTR_CPU_HAS_PAIRS
HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// Writes a float as the sum of three numbers of bf16.
inline void split(float value, Pair* target) {
  std::array<common::BFloat16, 3> parts;
  float rest = value;
  for (common::BFloat16& part : parts) {
    part = common::from_float<common::BFloat16>(rest);
    if (std::isfinite(rest) && std::isinf(common::to_float(part))) {
      part.bits -= 1;  // the largest number, which leaves a rest
    }
    rest = std::isfinite(rest) ? rest - common::to_float(part) : 0;
  }
  target[0] = {{parts[0], parts[1]}};
  target[1] = {{parts[2], {}}};
}

inline void write_q_hat(const Segment& segment, Estimator estimator, const common::BFloat16* q, Pair* q_hat) {
  const common::Groups& groups = segment.groups;
  if (groups.members == 1) {
    put_columns(q, groups.order, groups.count, q_hat);
  }
  if (groups.members == 1 && segment.means == nullptr) {
    return;
  }
  std::array<float, kMaxHeadDim> row;
  load_row(q, groups.columns, row.data());
  if (groups.members > 1) {
    alignas(64) std::array<float, kMaxHeadDim> estimate{};
    estimate_row(groups, estimator, row.data(), estimate.data());
    round_row(estimate.data(), round_up(groups.count, vector_length()), q_hat);
  }
  if (segment.means != nullptr) {
    split(dropped_score(segment, row.data()), q_hat + words<Pair>(groups.count));
  }
}

inline float score_of_means(const Pair* q_hat, const common::Groups& groups) {
  const common::BFloat16* parts = values(q_hat + words<Pair>(groups.count));
  return common::to_float(parts[0]) + (common::to_float(parts[1]) + common::to_float(parts[2]));
}

inline void fuse_group(const common::Groups& groups, std::int64_t g, const Pair* k_transposed, std::int64_t padded_keys,
                       float* row) {
  const hn::ScalableTag<float> tag;
  for (std::int64_t j = 0; j < padded_keys; j += vector_length()) {
    auto sum = column_of_pairs(tag, k_transposed, groups.column(g, 0), j);
    for (std::int64_t member = 1; member < groups.size(g); ++member) {
      sum = hn::Add(sum, column_of_pairs(tag, k_transposed, groups.column(g, member), j));
    }
    hn::StoreU(sum, tag, row + j);
  }
}

inline void fuse_k(const Segment& segment, const Pair* k_transposed, std::int64_t padded_keys, Pair* k_hat,
                   KHatRows<Pair>& rows) {
  const common::Groups& groups = segment.groups;
  const std::int64_t count = words<Pair>(groups.count);
  for (std::int64_t w = 0; w < count; ++w) {
    rows[static_cast<std::size_t>(w)] = (groups.order == nullptr ? k_transposed : k_hat) + w * kTileKeys;
  }
  if (groups.order != nullptr && groups.members == 1) {
    pick_columns(k_transposed, groups.order, groups.count, padded_keys, k_hat);
  } else if (groups.order != nullptr) {
    alignas(64) std::array<std::array<float, kTileKeys>, 2> sums;
    for (std::int64_t g = 0; g < groups.count; g += 2) {
      const bool has_second = g + 1 < groups.count;
      fuse_group(groups, g, k_transposed, padded_keys, sums[0].data());
      if (has_second) {
        fuse_group(groups, g + 1, k_transposed, padded_keys, sums[1].data());
      }
      round_rows(sums[0].data(), has_second ? sums[1].data() : nullptr, padded_keys, k_hat + g / 2 * kTileKeys);
    }
  }
  if (segment.means != nullptr) {
    std::fill_n(k_hat + count * kTileKeys, 2 * kTileKeys, one<Pair>());
    rows[static_cast<std::size_t>(count)] = k_hat + count * kTileKeys;
    rows[static_cast<std::size_t>(count) + 1] = k_hat + (count + 1) * kTileKeys;
  }
}

inline void dropped_columns(const Segment& segment, const Pair* k_transposed, std::int64_t padded_keys, Pair* k_hat,
                            KHatRows<Pair>& rows) {
  const common::Groups& groups = segment.groups;
  const std::int64_t dropped = groups.columns - groups.count;
  pick_columns(k_transposed, groups.order + groups.count, dropped, padded_keys, k_hat);
  for (std::int64_t w = 0; w < words<Pair>(dropped); ++w) {
    rows[static_cast<std::size_t>(w)] = k_hat + w * kTileKeys;
  }
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#endif
