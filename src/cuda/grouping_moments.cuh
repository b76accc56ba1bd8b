// SPDX-License-Identifier: Apache-2.0
// The means of the columns of K and their squared deviations, sum_j (K[j, c] - mean_j K[:, c])^2, by which `energy`
// weighs them. They are summed around a pivot near the mean, so that a large mean costs no digits. This file says how
// the keys are cut into strips and runs, and how the moments of runs are combined.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/grouping_loads.cuh"
#include "cuda/heuristics.h"

namespace distr::cuda::energy {

using grouping::Lane;
using grouping::QueryPieces;
using grouping::RowSpan;

// How the keys of a head are cut. Strip s holds the keys s * length + phase .. (s + 1) * length + phase - 1 as far as
// they exist. A head has at most 2^29 rows (grouping::unsupported_reason), so 32 bits count them.
struct KeyStrips {
  const std::byte* k;  // [batch, heads, seq, d]
  Strides strides;     // bytes
  Divisor heads;
  Divisor runs;             // of a head
  int run_strips;           // strips of a run
  int strips;               // of a head
  int length, phase;        // phase: -length + 1 to 0
  int block_strips, shift;  // block b needs the strips before b * block_strips + shift; block_strips = 0: all
  int first_block;          // of those that need any, with `previous`
  int seq;
  std::int64_t count;  // of all runs

  // All but where K is. `has_means`: the means of the first block's keys are wanted, too.
  KeyStrips(const Problem& problem, const QueryPieces& queries, bool has_means)
      : k(nullptr),
        strides(grouping::in_bytes(problem.k, problem.dtype)),
        heads(static_cast<std::uint32_t>(problem.heads_kv)),
        runs(1),
        first_block(has_means ? 0 : 1),
        seq(static_cast<int>(problem.seq_k)) {
    const std::int64_t all_heads = problem.batch * problem.heads_kv;
    const int max_runs =
        static_cast<int>(std::clamp<std::int64_t>(kGridRuns / std::max<std::int64_t>(1, all_heads), 1, kMaxRuns));
    if (queries.previous == 0) {
      length = ceil_div(std::max(1, seq), max_runs * kMinRunKeys) * kMinRunKeys;
      phase = block_strips = shift = 0;
      strips = ceil_div(seq, length);
      run_strips = 1;
    } else {
      length = queries.block;
      while (length % 2 == 0 && length >= 2 * kMinRunKeys) {
        length /= 2;
      }
      block_strips = queries.block / length;
      const auto offset = static_cast<int>(common::causal_offset(problem));
      shift = offset / length + (offset % length > 0 ? 1 : 0);
      phase = offset - shift * length;
      const int last = (static_cast<int>(queries.blocks.value()) - 1) * block_strips + shift;
      const bool any = seq > 0 && static_cast<int>(queries.blocks.value()) > first_block;
      strips = any ? std::clamp(last, 0, ceil_div(seq - phase, length)) : 0;
      run_strips = std::max(ceil_div(strips, max_runs), ceil_div(kMinRunKeys, length));
    }
    const int head_runs = ceil_div(strips, run_strips);
    runs = Divisor(static_cast<std::uint32_t>(head_runs));
    count = all_heads * head_runs;
  }

  // The end of the strips that a block needs.
  [[nodiscard]] __device__ int strips_of(int block) const {
    return block_strips == 0 ? strips : block < first_block ? 0 : min(max(block * block_strips + shift, 0), strips);
  }
  // The run of a strip.
  [[nodiscard]] __device__ int run_of(int strip) const { return run_strips == 1 ? strip : strip / run_strips; }
  // The first key of a strip.
  [[nodiscard]] __device__ int start(int strip) const { return min(max(strip * length + phase, 0), seq); }
  // The keys first .. end - 1 of a head.
  [[nodiscard]] __device__ RowSpan keys(std::uint32_t head, int first, int end) const {
    return {k + head / heads * strides.batch + head % heads * strides.head + first * strides.row, strides.row,
            end - first};
  }

 private:
  static int ceil_div(int a, int b) { return a / b + (a % b != 0 ? 1 : 0); }
};

// The squared deviations of `count` values from their mean, given the sum and the squares of their differences from a
// pivot p:
//   sum (x - mean)^2 = sum (x - p)^2 - (sum (x - p))^2 / count
// The pivot is one of the values or near them, so a large mean costs no digits.
[[nodiscard]] __device__ inline float centered_squares(float count, float sum, float squares) {
  const float result = squares - sum * __fdividef(sum, count);
  return result < 0 ? 0 : result;  // NaN stays
}

// The mean of a column over some keys, and the sum of squared deviations from it.
struct alignas(8) Moments {
  float mean;
  float squares;
};

// Combines the moments of several runs of keys of a column, around a pivot: the mean of one of the runs.
struct MomentSums {
  float pivot = 0;
  float sum = 0;
  float squares = 0;

  __device__ void add(float more_count, const Moments& more) {
    const float step = more.mean - pivot;
    const float more_sum = more_count * step;
    sum += more_sum;
    squares += more.squares + more_sum * step;
  }
};

// Reads the moments of the first strips of a KV head, for two columns. The four lanes l, l + 8, l + 16 and l + 24 of a
// warp share both columns, and each takes every fourth run. The constructor finds the addresses, so that it can run
// before the wait for the kernel that writes them.
class MomentReader {
 public:
  // `runs` is [runs, width] of the head and `strips` is [strips, width], both from the two columns on. `end` is the end
  // of the strips. `quarter`, 0 to 3, says which runs the lane takes; lanes of even quarters return the left column.
  __device__ MomentReader(const KeyStrips& keys, const Moments* runs, const Moments* strips, int width, int quarter,
                          int end)
      : step_(4 * width), quarter_(quarter), strips_(end) {
    const int last_strip = max(end - 1, 0);
    const int last = keys.run_of(last_strip);
    const bool whole = end == min((last + 1) * keys.run_strips, keys.strips);
    last_ = whole ? runs + last * width : strips + static_cast<std::int64_t>(last_strip) * width;
    next_ = runs + quarter * width;
    count_ = (last + 3 - quarter) / 4;
    run_keys_ = static_cast<float>(keys.run_strips * keys.length);
    first_keys_ = quarter == 0 ? static_cast<float>(keys.start(keys.run_strips)) : run_keys_;
    all_keys_ = static_cast<float>(keys.start(end));
  }

  [[nodiscard]] __device__ int strips() const { return strips_; }

  // mean_j K[:, c] and sum_j (K[j, c] - mean_j K[:, c])^2 of the lane's column, if there is a strip. The runs are added
  // around the mean of the last one, because the first one may be a single key, which is often far from all others.
  template <int kLoads>  // loads in flight at the same time
  [[nodiscard]] __device__ Moments total() const {
    const Two last_run = load(true, last_);
    MomentSums left{last_run.left.mean};
    MomentSums right{last_run.right.mean};
    float next_keys = first_keys_;
    const Moments* next = next_;
    int count = count_;
    do {
      Two loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        loaded[i] = load(i < count, next);
        next += step_;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        left.add(i < count ? next_keys : 0, loaded[i].left);
        right.add(i < count ? next_keys : 0, loaded[i].right);
        next_keys = run_keys_;
      }
      count -= kLoads;
    } while (__any_sync(~0U, count > 0));
    const bool is_left = quarter_ % 2 == 0;
    MomentSums own = is_left ? left : right;
    own.sum += __shfl_xor_sync(~0U, is_left ? right.sum : left.sum, 8);
    own.squares += __shfl_xor_sync(~0U, is_left ? right.squares : left.squares, 8);
    own.sum += __shfl_xor_sync(~0U, own.sum, 16);
    own.squares += __shfl_xor_sync(~0U, own.squares, 16);
    own.squares += is_left ? last_run.left.squares : last_run.right.squares;
    return {own.pivot + __fdividef(own.sum, all_keys_), centered_squares(all_keys_, own.sum, own.squares)};
  }

 private:
  struct alignas(16) Two {
    Moments left, right;
  };
  // A missing run gives constant zeros: a value that depended on another load would wait for it.
  [[nodiscard]] __device__ static Two load(bool exists, const Moments* from) {
    return exists ? *reinterpret_cast<const Two*>(from) : Two{};
  }

  const Moments* last_;  // the last run, or its strips up to `end`
  const Moments* next_;  // the lane's first run
  int step_;             // between the lane's runs
  int quarter_;
  int strips_;
  int count_;         // the lane's runs before the last run
  float run_keys_;    // keys of a run that is neither the head's first nor its last
  float first_keys_;  // keys of the lane's first run
  float all_keys_;
};

// Sums over rows of a lane's 8 columns.
struct LaneSums {
  float sums[8] = {};
  float squares[8] = {};

  // Adds the rows of a round, less the pivots of their columns.
  template <class Round>
  __device__ void add(const Round& round, const float (&pivots)[8]) {
#pragma unroll
    for (int chunk = 0; chunk < Round::kChunks; ++chunk) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float x = Round::value(round.words[chunk][r], i) - pivots[i];
          sums[i] += x;
          squares[i] += x * x;
        }
      }
    }
  }
  // Adds the squares of the rows as they are, without pivots.
  template <class Round>
  __device__ void add_squares(const Round& round) {
#pragma unroll
    for (const auto& chunk : round.words) {
#pragma unroll
      for (const typename Round::Row& row : chunk) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float x = Round::value(row, i);
          squares[i] += x * x;
        }
      }
    }
  }
};

// The sum of a column's squares over the pieces of a block of Q; `squares`: [pieces, width] from the column on.
[[nodiscard]] __device__ inline float sum_of_pieces(const float* squares, int pieces, int width) {
  constexpr int kLoads = 16;
  float sum = *squares;
  for (int first = 1; first < pieces; first += kLoads) {
    float loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded[i] = first + i < pieces ? squares[(first + i) * width] : 0;
    }
#pragma unroll
    for (const float square : loaded) {
      sum += square;
    }
  }
  return sum;
}

// Adds lanes 4 g .. 4 g + 3: lane t gets the sums of kCount / 4 of their values, from t % 2 * kCount / 2 + t / 2 *
// kCount / 4 on.
template <int kCount>
__device__ void add_quad(float (&values)[kCount], int t) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const int half = kCount / 2 / step;
    const bool upper = (t & step) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float lower = values[i];
      const float given = __shfl_xor_sync(~0U, upper ? lower : values[half + i], step);
      values[i] = (upper ? values[half + i] : lower) + given;
    }
  }
}

}  // namespace distr::cuda::energy
