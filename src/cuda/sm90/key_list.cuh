// SPDX-License-Identifier: Apache-2.0
// Which keys a launch with a list takes, in halves of tiles: 64 keys (method, 8). A producer reads the list of its
// thread block, from the last half to the first, and leaves what it loads beside each tile, for the consumers.
#pragma once

#include <cstdint>

#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

inline constexpr int kHalfKeys = common::kSkipKeys;

// A half of the list, or one that is loaded and hidden, as a tile takes whole numbers of halves.
class ListedHalf {
 public:
  ListedHalf() = default;
  __device__ ListedHalf(int number, bool is_listed)
      : bits_(static_cast<unsigned>(number) | (is_listed ? kListed : 0)) {}
  __device__ explicit ListedHalf(unsigned bits) : bits_(bits) {}

  [[nodiscard]] __device__ unsigned bits() const { return bits_; }
  [[nodiscard]] __device__ int first_key() const { return static_cast<int>(bits_ & (kListed - 1)) * kHalfKeys; }
  [[nodiscard]] __device__ bool is_listed() const { return (bits_ & kListed) != 0; }

 private:
  static constexpr unsigned kListed = 1U << 31;
  unsigned bits_;
};

// The halves low .. high - 1, of those 32 word .. 32 word + 31, a bit each.
[[nodiscard]] __device__ inline std::uint32_t bits_between(int low, int high, int word) {
  const auto below = [&](int end) {
    const int bits = end - 32 * word;
    return bits <= 0 ? 0U : bits >= 32 ? ~0U : (1U << bits) - 1;
  };
  return below(high) & ~below(low);
}

// The list of a thread block of two consumers.
class KeyList {
 public:
  __device__ KeyList(const ForwardParameters& p, const WorkTile& work) : set_(p.listed.set) {
    const std::int64_t keys = seen_keys(p.problem, work, kRows, p.row_end);  // that any of the block's queries sees
    tiles_ = near_tiles(p.problem, work.row, keys);
    first_ = static_cast<int>(first_visible_key(p.problem, work.row) / kHalfKeys);
    halves_ = static_cast<int>((keys + kHalfKeys - 1) / kHalfKeys);
    nothing_ = static_cast<int>((p.problem.seq_k + kHalfKeys - 1) / kHalfKeys);
  }

  [[nodiscard]] __device__ int words() const { return (halves_ + 31) / 32; }
  // Those of the halves 32 w .. 32 w + 31, a bit each.
  [[nodiscard]] __device__ std::uint32_t word(int w) const {
    const std::uint32_t far = far_ones(w);
    return set_ == KeySet::near ? bits_between(first_, halves_, w) & ~far : far;
  }
  // How many halves of the list have a number of at least `first`. By all threads of a warp.
  [[nodiscard]] __device__ int count(int first) const {
    int sum = 0;
    for (int w = static_cast<int>(threadIdx.x) % 32; w < words(); w += 32) {
      sum += __popc(word(w) & bits_between(first, halves_, w));
    }
    for (int other = 16; other > 0; other /= 2) {
      sum += __shfl_xor_sync(~0U, sum, other);
    }
    return uniform(sum);
  }
  // How many halves of the list, from its last one on, come before one that all of the block's rows see whole, and all
  // others behind it: all, where it has a sliding window's left end. By all threads of a warp.
  [[nodiscard]] __device__ int count_masked(const ForwardParameters& p, const WorkTile& work) const {
    const std::int64_t last_row = min(std::int64_t{work.row} + kRows, p.row_end) - 1;
    const int all = count(0);
    return count(halves_before(first_visible_key(p.problem, last_row))) < all
               ? all
               : count(static_cast<int>(visible_keys(p.problem, work.row) / kHalfKeys));
  }
  // A half behind the last key, where TMA writes zeros.
  [[nodiscard]] __device__ ListedHalf nothing() const { return {nothing_, false}; }

 private:
  static constexpr int kRows = 128;

  [[nodiscard]] __device__ static int halves_before(std::int64_t key) {
    return static_cast<int>((key + kHalfKeys - 1) / kHalfKeys);
  }
  [[nodiscard]] __device__ std::uint32_t far_ones(int w) const {
    return bits_between(first_, halves_, w) & ~bits_between(0, 2 * tiles_.sinks, w) &
           ~bits_between(2 * tiles_.first, 2 * tiles_.last, w);
  }

  NearTiles tiles_;
  int first_, halves_, nothing_;
  KeySet set_;
};

// Reads a list from its last half to its first, and then on without end.
class KeyListReader {
 public:
  __device__ explicit KeyListReader(const KeyList& list) : list_(list), word_(list.words()) {}

  [[nodiscard]] __device__ ListedHalf next() {
    while (bits_ == 0) {
      if (word_ == 0) {
        return list_.nothing();
      }
      bits_ = list_.word(--word_);
    }
    const int bit = 31 - __clz(static_cast<int>(bits_));
    bits_ &= ~(1U << bit);
    return {32 * word_ + bit, true};
  }
  // The next tile, its last keys first.
  template <int kHalves>
  __device__ void next(ListedHalf (&tile)[kHalves]) {
#pragma unroll
    for (int i = kHalves - 1; i >= 0; --i) {
      tile[i] = next();
    }
  }

 private:
  KeyList list_;
  int word_;  // that was read last
  std::uint32_t bits_ = 0;
};

}  // namespace distr::cuda::sm90
