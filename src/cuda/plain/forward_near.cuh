// SPDX-License-Identifier: Apache-2.0
// The plain forward with near keys and skipped halves of tiles (method, 8), in fp32.
//
// A block of 16 x 16 threads takes the rows 64 i .. 64 i + 63 of a head, which skip together, and up to 128 columns of
// V, as forward_kernel does; where l is no multiple of 64, parts of its rows have orders and near keys of their own.
// Wider V is shared by blocks along grid.y, each of which computes scores and decisions anew.
//   Near keys, 64 at a time: scores from all columns, those of rows for which the keys are far hidden; online softmax,
//   P V. L_i = maximum + log(sum), which stays. No other block has keys of these rows, so it is known here. Far keys,
//   64 at a time: scores from q_hat and k_hat, part by part, and the row's constant of the means. If no row has a score
//   above L_i + ln p, that is all: one vote of the thread block. Else, with `finish`, scores from all columns; online
//   softmax, P V.
// Shared memory: ForwardShared; the columns as they are [512]; the near tiles of each row [64].
#pragma once

#include "cuda/near.cuh"
#include "cuda/plain/forward.cuh"

namespace distr::cuda::plain {

struct NearShared {
  ForwardShared forward;
  std::int32_t identity[kMaxHeadDim];
  NearTiles near[kSide];
};
static_assert(sizeof(NearShared) <= 48 * 1024);

// 64 rows that skip together.
__device__ inline Tile find_rows(const DeviceProblem& problem) {
  const std::int64_t tiles = (problem.seq_q + kSide - 1) / kSide;
  const std::int64_t head = blockIdx.x / tiles;
  Tile result{};
  result.b = head / problem.heads_q;
  result.h = head % problem.heads_q;
  result.h_kv = result.h / (problem.heads_q / problem.heads_kv);
  result.first = blockIdx.x % tiles * kSide;
  result.rows = min(problem.seq_q - result.first, std::int64_t{kSide});
  result.exact = true;
  return result;
}

// Rows begin .. end - 1 of a tile, which have one order and the same near keys.
struct Part {
  Tile tile;  // all rows of the tile, with the part's order
  int begin, end;

  [[nodiscard]] __device__ bool has(int row) const { return begin <= row && row < end; }
};

__device__ inline Part part_from(const DeviceProblem& problem, const Tile& rows, int begin) {
  const std::int64_t row = rows.first + begin;
  const std::int64_t end = (row / problem.near.rows + 1) * problem.near.rows - rows.first;
  Part result{rows, begin, static_cast<int>(min(end, rows.rows))};
  result.tile.block = row / problem.block;
  result.tile.order_row = (rows.b * problem.heads_q + rows.h) * problem.blocks + result.tile.block;
  result.tile.exact = problem.exact || (problem.first_block_is_exact && result.tile.block == 0);
  return result;
}

// Scores of this thread's rows with far keys: what the part's rows have of them, others as they are.
template <class T>
__device__ void compute_far_scores(const ForwardArguments& arguments, const Part& part, const T* q, const T* k,
                                   std::int64_t first_key, const float (&dropped)[4], NearShared& shared,
                                   std::int64_t& loaded, float (&r_s)[4][4]) {
  const DeviceProblem& problem = arguments.problem;
  const int d = problem.head_dim;
  TileGroups groups{shared.identity, d, d, 1};
  if (!part.tile.exact) {
    groups = {shared.forward.order, d, problem.groups, problem.members};
    if (loaded != part.tile.block) {
      load_groups(problem, part.tile, arguments.order, shared.forward.order);
      loaded = part.tile.block;
    }
  }
  float r_part[4][4];
  compute_scores(problem, arguments.scale, part.tile, groups, q, k, first_key, shared.forward.staged, r_part);
  const int y = static_cast<int>(threadIdx.x) / 16;
  for (int row = 0; row < 4; ++row) {
    for (int key = 0; key < 4 && part.has(4 * y + row); ++key) {
      r_s[row][key] = r_part[row][key] == kHidden ? kHidden : r_part[row][key] + dropped[row];
    }
  }
}

// What the means of dropped columns add to the far scores of this thread's rows.
template <class T>
__device__ void compute_dropped(const ForwardArguments& arguments, const Tile& rows, const T* q, NearShared& shared,
                                float (&dropped)[4]) {
  const DeviceProblem& problem = arguments.problem;
  const int y = static_cast<int>(threadIdx.x) / 16;
  for (int begin = 0; problem.near.has_means && begin < rows.rows;) {
    const Part part = part_from(problem, rows, begin);
    if (!part.tile.exact) {
      const TileGroups groups = load_groups(problem, part.tile, arguments.order, shared.forward.order);
      float r_part[4];
      dropped_scores(problem, arguments.scale, part.tile, groups, arguments.key_means, q, r_part);
      for (int row = 0; row < 4; ++row) {
        dropped[row] = part.has(4 * y + row) ? r_part[row] : dropped[row];
      }
    }
    begin = part.end;
  }
}

// Hides a tile of keys from those of this thread's rows for which it is far, or from those for which it is near.
__device__ inline void keep_only(const NearShared& shared, bool near, int key_tile, float (&r_s)[4][4]) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  for (int row = 0; row < 4; ++row) {
    const bool hidden = shared.near[4 * y + row].has(key_tile) != near;
    for (int key = 0; key < 4; ++key) {
      r_s[row][key] = hidden ? kHidden : r_s[row][key];
    }
  }
}

// How many far halves the 64 rows kept, and in how many one of them sees a far key.
struct Counts {
  std::int32_t kept = 0, seen = 0;

  // Whether one of the rows has a score above its threshold.
  [[nodiscard]] __device__ bool vote(const float (&r_s)[4][4], const float (&threshold)[4]) {
    bool sees = false;
    bool keeps = false;
    for (int row = 0; row < 4; ++row) {
      for (const float score : r_s[row]) {
        sees = sees || score != kHidden;
        keeps = keeps || (score != kHidden && !(score <= threshold[row]));  // NaN keeps
      }
    }
    const bool kept_by_any = __syncthreads_or(keeps ? 1 : 0) != 0;
    seen += __syncthreads_or(sees ? 1 : 0) != 0 ? 1 : 0;
    kept += kept_by_any ? 1 : 0;
    return kept_by_any;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2) near_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  __shared__ NearShared shared;
  const DeviceProblem& problem = arguments.problem;
  const Tile tile = find_rows(problem);
  const int first_column = static_cast<int>(blockIdx.y) * kColumns;
  const int columns = min(kColumns, problem.head_dim_v - first_column);
  const auto* q = static_cast<const T*>(arguments.q) + tile.b * problem.q.batch + tile.h * problem.q.head +
                  tile.first * problem.q.row;
  const auto* k = static_cast<const T*>(arguments.k) + tile.b * problem.k.batch + tile.h_kv * problem.k.head;
  const auto* v =
      static_cast<const T*>(arguments.v) + tile.b * problem.v.batch + tile.h_kv * problem.v.head + first_column;
  const std::int64_t last_row = tile.first + tile.rows - 1;
  const std::int64_t keys = visible_keys(problem, last_row);
  const auto halves = static_cast<int>((keys + kSide - 1) / kSide);
  if (threadIdx.x < kSide) {
    const std::int64_t row = min(tile.first + threadIdx.x, last_row);
    shared.near[threadIdx.x] = near_tiles(problem, row, keys);
  }
  for (int c = static_cast<int>(threadIdx.x); c < problem.head_dim; c += kThreads) {
    shared.identity[c] = c;
  }
  float dropped[4] = {};
  compute_dropped(arguments, tile, q, shared, dropped);
  __syncthreads();

  RowState rows;
  const auto exact_scores = [&](int key_half, bool near, float(&r_s)[4][4]) {
    const std::int64_t first = std::int64_t{key_half} * kSide;
    compute_scores(problem, arguments.scale, tile, {shared.identity, problem.head_dim, problem.head_dim, 1}, q,
                   k + first * problem.k.row, first, shared.forward.staged, r_s);
    keep_only(shared, near, key_half / 2, r_s);
  };
  const auto take = [&](int key_half, float(&r_s)[4][4]) {
    online_softmax(r_s, rows, shared.forward);
    add_values(problem, v, std::int64_t{key_half} * kSide, columns, shared.forward, rows);
  };
  const NearTiles near = near_tiles(problem, tile.first, last_row, keys);
  for (int n = 0; n < 2 * near.near_count(); ++n) {
    const int key_half = 2 * near.near(n / 2) + n % 2;
    if (key_half < halves) {
      float r_s[4][4];
      exact_scores(key_half, true, r_s);
      take(key_half, r_s);
    }
  }

  float threshold[4];
  for (int row = 0; row < 4; ++row) {
    threshold[row] = rows.maximum[row] + logf(rows.sum[row]) + problem.near.log_skip;
  }
  Counts counts;
  std::int64_t loaded = -1;
  for (int key_half = 0; key_half < halves; ++key_half) {
    float r_s[4][4];
    bool far = false;
    for (float(&row)[4] : r_s) {
      row[0] = row[1] = row[2] = row[3] = kHidden;
    }
    for (int begin = 0; begin < tile.rows;) {
      const Part part = part_from(problem, tile, begin);
      begin = part.end;
      if (!shared.near[part.begin].has(key_half / 2)) {
        const std::int64_t first = std::int64_t{key_half} * kSide;
        compute_far_scores(arguments, part, q, k + first * problem.k.row, first, dropped, shared, loaded, r_s);
        far = true;
      }
    }
    if (!far || (problem.near.skips && !counts.vote(r_s, threshold))) {
      continue;
    }
    if (problem.near.finishes) {
      exact_scores(key_half, false, r_s);
    }
    take(key_half, r_s);
  }
  store<T>(arguments, tile, first_column, columns, rows);
  if (arguments.halves != nullptr && first_column == 0 && threadIdx.x == 0) {
    arguments.halves[2 * std::int64_t{blockIdx.x}] = counts.kept;
    arguments.halves[2 * std::int64_t{blockIdx.x} + 1] = counts.seen;
  }
}

}  // namespace distr::cuda::plain
