// SPDX-License-Identifier: Apache-2.0
// Which halves of tiles a thread block of near_forward meets, one after another, and with which columns (near.cuh).
#pragma once

#include <cstdint>

#include "cuda/near.cuh"

namespace distr::cuda::sm80 {

// Which columns the positions of Q and K^T have: those that far scores keep, up to a multiple of 16, then the others.
struct Positions {
  bool exact;                       // all columns are kept, in any order
  int kept, kept_steps, all_steps;  // columns, and steps of 16 positions

  __device__ Positions(const DeviceProblem& problem, bool is_exact)
      : exact(is_exact),
        kept(exact ? problem.head_dim : problem.groups),
        kept_steps((kept + 15) / 16),
        all_steps(kept_steps + (problem.head_dim - kept + 15) / 16) {}

  // The position's number in the order of the columns; -1 where there is none.
  [[nodiscard]] __device__ int rank(int position, int head_dim) const {
    const int dropped = kept + position - kept_steps * 16;
    return position < kept_steps * 16 ? (position < kept ? position : -1) : (dropped < head_dim ? dropped : -1);
  }
};

// Halves begin .. end - 1 of tiles, of one kind. Half i has the keys 64 i .. 64 i + 63.
struct alignas(16) KeySegment {
  std::int32_t begin, end;
  std::int16_t steps, copied_steps;  // of 16 columns: of scores, and of K^T in shared memory
  bool is_far, begins_far;           // the first far one
  bool is_whole;                     // every row of the block sees all keys
  bool is_online;                    // the row max changes

  [[nodiscard]] __device__ bool exists() const { return begin >= 0; }
};

// The halves that a thread block meets, one segment after another: near ones, then far ones, each in ascending order.
// Behind the last there is one that begins below 0.
struct KeySegments {
  static constexpr int kMost = 6;  // two runs of each kind, of which two may be cut where not every row sees all keys
  KeySegment of[kMost + 1];

  // tiles: those of which `halves` halves count. Every row sees all keys of the halves first_whole .. whole_end - 1.
  __device__ void make(const DeviceProblem& problem, const NearTiles& tiles, const Positions& positions, int halves,
                       int first_whole, int whole_end) {
    int count = 0;
    const auto add = [&](int begin, int end, bool is_far, bool is_whole) {
      if (begin < end) {
        const bool has_near = count > 0 && !of[0].is_far;
        const bool kept = is_far && !problem.near.finishes;
        of[count] = {begin,
                     end,
                     static_cast<std::int16_t>(is_far ? positions.kept_steps : positions.all_steps),
                     static_cast<std::int16_t>(kept ? positions.kept_steps : positions.all_steps),
                     is_far,
                     is_far && (count == 0 || !of[count - 1].is_far),
                     is_whole,
                     !is_far || problem.near.skips || !has_near || problem.mask.kind != MaskKind::none};
        ++count;
      }
    };
    const auto add_run = [&](int first_tile, int last_tile, bool is_far) {
      const int begin = 2 * first_tile;
      const int end = min(2 * last_tile, halves);
      const int whole = min(max(first_whole, begin), end);
      const int behind = min(max(whole_end, whole), end);
      add(begin, whole, is_far, false);
      add(whole, behind, is_far, true);
      add(behind, end, is_far, false);
    };
    add_run(tiles.begin, tiles.sinks, false);
    add_run(tiles.first, tiles.last, false);
    add_run(tiles.sinks, tiles.first, true);
    add_run(tiles.last, tiles.end, true);
    const bool is_far = count > 0 && of[count - 1].is_far;
    of[count] = {-1, -1, 0, 0, is_far, false, false, false};
  }

  // Whether there are far keys.
  [[nodiscard]] __device__ bool has_far() const {
    int last = 0;
    while (of[last].exists()) {
      ++last;
    }
    return of[last].is_far;
  }
};

}  // namespace distr::cuda::sm80
