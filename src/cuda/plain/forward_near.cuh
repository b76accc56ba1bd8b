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
// Shared memory: ForwardShared, and what each row has of its own (NearShared).
#pragma once

#include "cuda/near.cuh"
#include "cuda/plain/forward.cuh"
#include "cuda/ptx.cuh"

namespace distr::cuda::plain {

struct NearShared {
  ForwardShared forward;
  std::int32_t identity[kMaxHeadDim];
  NearTiles near[kSide];             // of each row
  std::int64_t block[kSide];         // of queries
  std::int32_t part_end[kSide];      // behind the last row with that block and those near keys
  float maximum[kSide], sum[kSide];  // what RowState says of them, but for O: there are no registers to keep it
  float threshold[kSide];            // L_i + ln p
  float dropped[kSide];              // what the means of dropped columns add to far scores
  Tile tile;  // the rows; from registers the compiler would keep all that it can compute of them for the whole loop
  NearTiles near_tile;      // what is near any of them
  std::int32_t step;        // near halves, then all
  std::int32_t halves;      // of tiles, from near_tile.begin on, that any of them sees
  std::int64_t loaded;      // the block whose order is there
  std::int32_t kept, seen;  // far halves that were kept, and in which a row sees a key
};
static_assert(sizeof(NearShared) <= 48 * 1024);

// Read anew each time: what follows from it would be kept in registers, of which there are none left.
__device__ inline int thread() { return static_cast<int>(ptx::opaque(threadIdx.x)); }

// This thread's n-th row of 4.
__device__ inline int row_of_thread(int n) { return 4 * (thread() / 16) + n; }

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

// Finds for each row what it has of its own. Divisions of 64 bits are here alone: in a loop they cost all registers.
__device__ inline void find_parts(const DeviceProblem& problem, NearShared& shared) {
  if (thread() == 0) {
    shared.tile = find_rows(problem);
  }
  __syncthreads();
  const Tile& rows = shared.tile;
  const std::int64_t keys = visible_keys(problem, rows.first + rows.rows - 1);
  if (thread() < kSide) {
    const std::int64_t row = min(rows.first + thread(), rows.first + rows.rows - 1);
    const std::int64_t end = (row / problem.near.rows + 1) * problem.near.rows - rows.first;
    shared.near[thread()] = near_tiles(problem, row, keys);
    shared.block[thread()] = row / problem.block;
    shared.part_end[thread()] = static_cast<int>(min(end, rows.rows));
    shared.dropped[thread()] = 0;
    shared.maximum[thread()] = kHidden;
    shared.sum[thread()] = 0;
  }
  for (int c = thread(); c < problem.head_dim; c += kThreads) {
    shared.identity[c] = c;
  }
  if (thread() == 0) {
    shared.near_tile = near_tiles(problem, rows.first, rows.first + rows.rows - 1, keys);
    shared.halves = max(static_cast<int>((keys + kSide - 1) / kSide) - 2 * shared.near_tile.begin, 0);
    shared.loaded = -1;
    shared.kept = shared.seen = shared.step = 0;
  }
  __syncthreads();
}

// The tile with the order of the part that begins at a row of it: rows of one order and the same near keys.
__device__ inline Tile part_from(const DeviceProblem& problem, Tile tile, int begin, const NearShared& shared) {
  tile.block = shared.block[begin];
  tile.order_row = (tile.b * problem.heads_q + tile.h) * problem.blocks + tile.block;
  tile.exact = problem.exact || (problem.first_block_is_exact && tile.block == 0);
  return tile;
}

// shared.dropped = what the means of dropped columns add to the far scores of each row.
template <class T>
__device__ void compute_dropped(const ForwardArguments& arguments, NearShared& shared) {
  const DeviceProblem& problem = arguments.problem;
  const Tile& tile = shared.tile;
  const T* q = rows_at<T>(arguments.q, problem.q, tile.b, tile.h, tile.first);
  for (int begin = 0; problem.near.has_means && begin < tile.rows;) {
    const Tile part = part_from(problem, tile, begin, shared);
    const int first = begin;
    begin = shared.part_end[first];
    if (!part.exact) {
      const TileGroups groups = load_groups(problem, part, arguments.order, shared.forward.order);
      for (int row = 0; row < 4; ++row) {
        const int of = row_of_thread(row);
        const float dropped = dropped_score(problem, arguments.scale, part, groups, arguments.key_means, q, row);
        if (first <= of && of < begin && thread() % 16 == 0) {
          shared.dropped[of] = dropped;
        }
      }
    }
  }
}

// The scores of this thread's rows and keys, in the place of P [key][row]: there are no registers to keep them.
__device__ inline float* scores_of_key(NearShared& shared, int key) {
  return shared.forward.p + (4 * (thread() % 16) + key) * kPitch + row_of_thread(0);
}

__device__ inline void load_scores(NearShared& shared, float (&r_s)[4][4]) {
  for (int key = 0; key < 4; ++key) {
    const float4 rows = *reinterpret_cast<const float4*>(scores_of_key(shared, key));
    r_s[0][key] = rows.x;
    r_s[1][key] = rows.y;
    r_s[2][key] = rows.z;
    r_s[3][key] = rows.w;
  }
}

// Computes the scores of 64 keys of a tile from all columns or, of far keys, as the parts of the rows have them; hidden
// for rows of which the keys are not near, or not far. Returns whether there are others.
template <class T>
__device__ bool compute_scores_of(const ForwardArguments& arguments, bool near, bool all_columns, int key_half,
                                  NearShared& shared) {
  const DeviceProblem& problem = arguments.problem;
  const Tile& tile = shared.tile;
  const int d = problem.head_dim;
  const int key_tile = key_half / 2;
  bool any = false;
#pragma unroll 1
  for (int begin = 0; begin < tile.rows;) {
    const int first = begin;
    begin = all_columns ? static_cast<int>(tile.rows) : shared.part_end[first];
    if (!all_columns && shared.near[first].has(key_tile)) {
      continue;
    }
    TileGroups groups{shared.identity, d, d, 1};
    const Tile part = part_from(problem, tile, first, shared);
    if (!all_columns && !part.exact) {
      groups = {shared.forward.order, d, problem.groups, problem.members};
      if (shared.loaded != part.block) {
        __syncthreads();
#pragma unroll 1
        for (int c = thread(); c < d; c += kThreads) {
          shared.forward.order[c] = arguments.order[part.order_row * d + c];
        }
        __syncthreads();
        shared.loaded = part.block;  // all threads write the same, and read it behind the barriers below
      }
    }
    const std::int64_t first_key = std::int64_t{key_half} * kSide;
    float r_s[4][4];
    compute_products(problem, tile, groups, rows_at<T>(arguments.q, problem.q, tile.b, tile.h, tile.first),
                     rows_at<T>(arguments.k, problem.k, tile.b, tile.h_kv, first_key), first_key, shared.forward.staged,
                     r_s);
    const auto dropped = [&](int row) { return all_columns ? 0.0F : shared.dropped[row_of_thread(row)]; };
    finish_scores(problem, arguments.scale, tile, first_key, dropped, Slope::none, r_s);
    for (int row = 0; row < 4; ++row) {
      const int of = row_of_thread(row);
      const bool own = first <= of && of < begin;
      const bool hidden = !own || shared.near[of].has(key_tile) != near;
      for (int key = 0; key < 4 && (own || !any); ++key) {
        scores_of_key(shared, key)[row] = hidden ? kHidden : r_s[row][key];
      }
    }
    any = true;
  }
  return any;
}

// Whether one of the rows has a score above its threshold. Counts the halves that are kept, and those in which a row
// sees a key.
__device__ inline bool vote(NearShared& shared) {
  float r_s[4][4];
  load_scores(shared, r_s);
  bool sees = false;
  bool keeps = false;
  for (int row = 0; row < 4; ++row) {
    const float threshold = shared.threshold[row_of_thread(row)];
    for (const float score : r_s[row]) {
      sees = sees || score != kHidden;
      keeps = keeps || (score != kHidden && !(score <= threshold));  // NaN keeps
    }
  }
  const bool kept = __syncthreads_or(keeps ? 1 : 0) != 0;
  const bool seen = __syncthreads_or(sees ? 1 : 0) != 0;
  if (thread() == 0) {
    shared.kept += kept ? 1 : 0;
    shared.seen += seen ? 1 : 0;
  }
  return kept;
}

__device__ inline void next_step(NearShared& shared) {
  __syncthreads();
  if (thread() == 0) {
    ++shared.step;
  }
  __syncthreads();
}

__device__ inline void load_rows(const NearShared& shared, RowState& rows) {
  for (int row = 0; row < 4; ++row) {
    rows.maximum[row] = shared.maximum[row_of_thread(row)];
    rows.sum[row] = shared.sum[row_of_thread(row)];
  }
}

__device__ inline void keep_rows(const RowState& rows, NearShared& shared) {
  __syncwarp();  // the 16 threads of a row have read it
  for (int row = 0; row < 4 && thread() % 16 == 0; ++row) {
    shared.maximum[row_of_thread(row)] = rows.maximum[row];
    shared.sum[row_of_thread(row)] = rows.sum[row];
  }
  __syncwarp();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) near_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  __shared__ NearShared shared;
  const DeviceProblem& problem = arguments.problem;
  find_parts(problem, shared);
  const Tile& tile = shared.tile;
  const auto first_column = [] { return static_cast<int>(blockIdx.y) * kColumns; };
  const auto columns = [&] { return min(kColumns, problem.head_dim_v - first_column()); };
  compute_dropped<T>(arguments, shared);
  __syncthreads();

  RowState rows;
#pragma unroll 1
  for (; shared.step < 2 * shared.near_tile.near_count() + shared.halves; next_step(shared)) {
    // What follows from the step is computed anew where it is needed: it would take registers.
    const auto is_near = [&] { return shared.step < 2 * shared.near_tile.near_count(); };
    const auto key_half = [&] {
      return is_near() ? 2 * shared.near_tile.near(shared.step / 2) + shared.step % 2
                       : shared.step - 2 * shared.near_tile.near_count() + 2 * shared.near_tile.begin;
    };
    if (shared.step == 2 * shared.near_tile.near_count() && thread() < kSide) {
      shared.threshold[thread()] = shared.maximum[thread()] + logf(shared.sum[thread()]) + problem.near.log_skip;
    }
    bool taken = key_half() < shared.halves + 2 * shared.near_tile.begin;
#pragma unroll 1
    for (bool all_columns = is_near(); taken; all_columns = true) {
      taken = compute_scores_of<T>(arguments, is_near(), all_columns, key_half(), shared);
      if (all_columns) {
        break;
      }
      taken = taken && (!problem.near.skips || vote(shared));
      if (!problem.near.finishes) {
        break;
      }
    }
    if (taken) {
      float r_s[4][4];
      load_scores(shared, r_s);
      load_rows(shared, rows);
      online_softmax(r_s, rows, shared.forward);
      keep_rows(rows, shared);
      const std::int64_t first = std::int64_t{key_half()} * kSide;
      add_values(rows_at<T>(arguments.v, problem.v, tile.b, tile.h_kv, first) + first_column(), problem.v.row,
                 problem.seq_k - first, columns(), shared.forward, rows);
    }
  }
  if (thread() < tile.rows) {
    const float sum = shared.sum[thread()];
    if (arguments.lse != nullptr && blockIdx.y == 0) {
      store_lse(arguments, tile, thread(), shared.maximum[thread()], sum);
    }
    shared.sum[thread()] = sum == 0 ? 0.0F : kHeadroom / sum;
  }
  __syncthreads();
  store_o<T>(arguments, tile, first_column(), columns(),
             [&](int row, int n) { return rows.o[row][n] * shared.sum[row_of_thread(row)]; });
  if (arguments.halves != nullptr && blockIdx.y == 0 && thread() == 0) {
    arguments.halves[2 * std::int64_t{blockIdx.x}] = shared.kept;
    arguments.halves[2 * std::int64_t{blockIdx.x} + 1] = shared.seen;
  }
}

}  // namespace distr::cuda::plain
