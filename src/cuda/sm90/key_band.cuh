// SPDX-License-Identifier: Apache-2.0
// The keys of a thread block's queries where there are no near ones: those that causality and a sliding window leave,
// one band of neighbouring tiles. And the order in which tiles are taken, with near keys as without.
#pragma once

#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"

namespace distr::cuda::sm90 {

// Tiles come from the last to the first, but for those at the left end of a sliding window: they have a mask, and come
// behind the masked ones of the right end, before all tiles without.
class TileOrder {
 public:
  TileOrder() = default;
  // right, left: tiles with a mask, at either end, as far as there are so many.
  __device__ TileOrder(int count, int right, int left)
      : count_(count), right_(min(right, count)), left_(min(left, count - right_)) {}

  [[nodiscard]] __device__ int count() const { return count_; }
  [[nodiscard]] __device__ int masked() const { return right_ + left_; }
  // The one that is taken as the n-th, where `last` is the last one's number.
  [[nodiscard]] __device__ __forceinline__ int tile(int n, int last) const {
    const int to_left = count_ - right_ - left_;
    return last - n + (n < right_ ? 0 : n < right_ + left_ ? -to_left : left_);
  }

 private:
  int count_ = 0, right_ = 0, left_ = 0;
};

// Where there is no window: the first keys.
template <int kKeys>
class FirstKeys {
 public:
  FirstKeys() = default;
  __device__ FirstKeys(const DeviceProblem& problem, const WorkTile& work, int rows, std::int64_t row_end)
      : count_(static_cast<int>((seen_keys(problem, work, rows, row_end) + kKeys - 1) / kKeys)),
        masked_(count_ - static_cast<int>(visible_keys(problem, work.row) / kKeys)) {}

  [[nodiscard]] __device__ int count() const { return count_; }
  [[nodiscard]] __device__ int masked() const { return masked_; }
  [[nodiscard]] __device__ __forceinline__ int tile(int n) const { return count_ - 1 - n; }

 private:
  int count_ = 0, masked_ = 0;
};

template <int kKeys>
class KeyBand {
 public:
  KeyBand() = default;
  // keys: a DeviceProblem or VisibleKeys; rows: of the block; row_end: behind the last query.
  template <class VisibleKeys>
  __device__ KeyBand(const VisibleKeys& keys, const WorkTile& work, int rows, std::int64_t row_end) {
    const std::int64_t last_row = min(std::int64_t{work.row} + rows, row_end) - 1;
    const auto end = static_cast<int>((visible_keys(keys, last_row) + kKeys - 1) / kKeys);
    const auto first = static_cast<int>(first_visible_key(keys, work.row) / kKeys);
    const auto whole = static_cast<int>((first_visible_key(keys, last_row) + kKeys - 1) / kKeys);
    last_ = end - 1;
    order_ = TileOrder(max(end - first, 0), end - static_cast<int>(visible_keys(keys, work.row) / kKeys),
                       max(whole - first, 0));
  }

  [[nodiscard]] __device__ int count() const { return order_.count(); }
  // Tiles, of the first ones, with keys that one of the rows does not see.
  [[nodiscard]] __device__ int masked() const { return order_.masked(); }
  [[nodiscard]] __device__ __forceinline__ int tile(int n) const { return order_.tile(n, last_); }

 private:
  int last_ = 0;
  TileOrder order_;
};

}  // namespace distr::cuda::sm90
