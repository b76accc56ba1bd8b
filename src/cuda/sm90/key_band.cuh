// SPDX-License-Identifier: Apache-2.0
// The keys of a thread block's queries where there are no near ones: those that causality and a sliding window leave,
// one band of neighbouring tiles.
#pragma once

#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"

namespace distr::cuda::sm90 {

// Tiles come from the last to the first, but for those at the band's left end: they have a mask, and come behind the
// masked ones of the right end, before all tiles without.
template <int kKeys>
class KeyBand {
 public:
  KeyBand() = default;
  // rows: of the block; row_end: behind the last query.
  __device__ KeyBand(const DeviceProblem& problem, const WorkTile& work, int rows, std::int64_t row_end) {
    const std::int64_t last_row = min(std::int64_t{work.row} + rows, row_end) - 1;
    const auto end = static_cast<int>((visible_keys(problem, last_row) + kKeys - 1) / kKeys);
    const auto first = static_cast<int>(first_visible_key(problem, work.row) / kKeys);
    count_ = max(end - first, 0);
    last_ = end - 1;
    right_ = min(end - static_cast<int>(visible_keys(problem, work.row) / kKeys), count_);
    const auto whole = static_cast<int>((first_visible_key(problem, last_row) + kKeys - 1) / kKeys);
    left_ = min(max(whole - first, 0), count_ - right_);
  }

  [[nodiscard]] __device__ int count() const { return count_; }
  // Tiles, of the first ones, with keys that one of the rows does not see.
  [[nodiscard]] __device__ int masked() const { return right_ + left_; }
  [[nodiscard]] __device__ __forceinline__ int tile(int n) const {
    const int to_left = count_ - right_ - left_;
    return last_ - n + (n < right_ ? 0 : n < right_ + left_ ? -to_left : left_);
  }

 private:
  int count_ = 0, last_ = 0;
  int right_ = 0, left_ = 0;  // tiles with a mask, at either end
};

}  // namespace distr::cuda::sm90
