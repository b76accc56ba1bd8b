// SPDX-License-Identifier: Apache-2.0
// The first launch of cuda/energy and cuda/means: read_tensors reads Q and K once. grouping_energy.cu says what for.
//
// A thread block takes one run of keys or one piece of a block of Q, and all columns: a warp takes 64 of them and, with
// up to 3 others, turns at chunks of 16 rows; a lane has 8 columns of 4 rows of a chunk (grouping_loads.cuh).
// Shared memory: Shared, where lanes, warps and groups are added up in a fixed order.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/grouping_loads.cuh"
#include "cuda/grouping_moments.cuh"

namespace distr::cuda::energy {

using grouping::kMaxThreads;
using grouping::kTileColumns;

struct Arguments {
  QueryPieces queries;
  KeyStrips keys;
  int head_dim;
  int width;            // of a row of the workspace: d rounded up to a multiple of 32
  int tiles;            // of 64 columns
  int groups;           // warps of a tile
  int heads_per_kv;     // query heads that share a KV head
  int part_blocks;      // blocks of Q that a thread block orders
  float* squares;       // [pieces of Q, width]
  Moments* runs;        // [KV heads, runs, width]
  Moments* strips;      // [KV heads, strips, width]: of a run up to the end of each strip but its last
  std::int32_t* order;  // [order rows, d]; null: the caller's
  float* key_means;     // [KV heads, means, d], or null
};

struct Sums {
  float sum, squares;
};

// Shared memory of read_tensors, which adds up over lanes, warps and groups.
struct Shared {
  float warps[kMaxThreads / 32][2][kTileColumns];  // sums, squares
  float pivots[kMaxThreads / 32 * kTileColumns];   // of the run
};

// Adds the lanes of a warp, hands them to the other warps, and calls visit(column, its sums) for each column of the
// workspace, by one thread. `values`: 8 columns' squares, or their sums and squares. `shared` may be written again
// after the next __syncthreads.
template <int kVector, int kCount, class Visitor>
__device__ void add_up(const Arguments& a, float (&values)[kCount], const Lane& lane, Shared& shared, Visitor visit) {
  add_quad(values, lane.t);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int at = 16 - kCount + lane.t % 2 * (kCount / 2) + lane.t / 2 * (kCount / 4) + i;
    shared.warps[threadIdx.x / 32][at / 8][grouping::column_of(kVector, lane.g, at % 8)] = values[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < a.width; c += static_cast<int>(blockDim.x)) {
    Sums total{};
#pragma unroll
    for (int group = 0; group < grouping::kMaxGroups; ++group) {
      if (group < a.groups) {
        const auto& more = shared.warps[c / kTileColumns * a.groups + group];
        total = {kCount == 16 ? total.sum + more[0][c % kTileColumns] : 0, total.squares + more[1][c % kTileColumns]};
      }
    }
    visit(c, total);
  }
}

// Writes the moments of one run up to the end of each of its strips.
template <class T, int kVector>
__device__ void read_run(const Arguments& a, const Lane& lane, Shared& shared) {
  using Round = grouping::Round<T, kVector>;
  const std::uint32_t head = blockIdx.x / a.keys.runs;
  int strip = static_cast<int>(blockIdx.x % a.keys.runs) * a.keys.run_strips;
  const int end = min(strip + a.keys.run_strips, a.keys.strips);
  const int start = a.keys.start(strip);
  const auto middle_of = [&](int of_strip) {  // the first key of a head is often far from all others
    return a.keys.keys(head, (a.keys.start(of_strip) + a.keys.start(of_strip + 1)) / 2, 0).first;
  };
  const std::byte* pivot_row = middle_of(strip);             // loaded in place of missing rows: its difference is 0
  const bool keeps_pivots = lane.t == 0 && lane.group == 0;  // this lane stores those of its columns
  RowSpan rows = a.keys.keys(head, start, a.keys.start(strip + 1));
  int n = 0;
  float pivots[8];
  LaneSums run;
  const auto take_pivots = [&] {
    const typename Round::Row pivot = Round::load_row(pivot_row, true, lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      pivots[i] = Round::value(pivot, i);
      if (keeps_pivots) {
        shared.pivots[lane.tile * kTileColumns + grouping::column_of(kVector, lane.g, i)] = pivots[i];
      }
    }
  };
#pragma unroll 1
  for (bool begins = true;; begins = false) {
    if (begins) {
      wait_on_dependent_grids();  // in the loop, so that the compiler does not move the code above behind the wait
    }
    Round round;
    round.load(rows, n, lane, pivot_row);
    if (begins) {
      take_pivots();
    }
    run.add(round, pivots);
    n += Round::rows(lane);
    if (n < rows.count) {
      continue;
    }
    const int next = strip + 1;
    const auto count = static_cast<float>(a.keys.start(next) - start);
    Moments* moments = next == end ? a.runs + static_cast<std::int64_t>(blockIdx.x) * a.width
                                   : a.strips + (static_cast<std::int64_t>(head) * a.keys.strips + strip) * a.width;
    float values[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = run.sums[i];
      values[8 + i] = run.squares[i];
    }
    add_up<kVector>(a, values, lane, shared, [&](int column, const Sums& sums) {
      moments[column] = {shared.pivots[column] + (count > 0 ? __fdividef(sums.sum, count) : 0),
                         centered_squares(count, sums.sum, sums.squares)};
    });
    if (next == end) {
      break;
    }
    __syncthreads();   // the sums have been read
    if (count == 1) {  // the strip was the pivot alone, so a key of the next strip becomes the pivot
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        run.sums[i] = pivots[i];
      }
      pivot_row = middle_of(next);
      take_pivots();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        run.sums[i] = keeps_pivots ? run.sums[i] - pivots[i] : 0;
        run.squares[i] = run.sums[i] * run.sums[i];
      }
    }
    rows = a.keys.keys(head, a.keys.start(next), a.keys.start(next + 1));
    strip = next;
    n = 0;
  }
}

// Writes the sums of squares of one piece of a block of Q.
template <class T, int kVector>
__device__ void read_queries(const Arguments& a, std::uint32_t piece, const Lane& lane, Shared& shared) {
  using Round = grouping::Round<T, kVector>;
  const RowSpan rows = a.queries.at(piece);
  LaneSums sums;
  int n = 0;
#pragma unroll 1
  do {
    if (n == 0) {
      wait_on_dependent_grids();  // in the loop, as above
    }
    Round round;
    round.load(rows, n, lane);
    sums.add_squares(round);
    n += Round::rows(lane);
  } while (n < rows.count);
  float* squares = a.squares + static_cast<std::int64_t>(piece) * a.width;
  add_up<kVector>(a, sums.squares, lane, shared,
                  [&](int column, const Sums& total) { squares[column] = total.squares; });
}

template <class T, int kVector>
__global__ void __launch_bounds__(kMaxThreads, 2) read_tensors(const Arguments a) {
  __shared__ Shared shared;
  launch_dependent_grids();
  const Lane lane(a.groups, a.head_dim);
  const auto runs = static_cast<std::uint32_t>(a.keys.count);
  if (blockIdx.x < runs) {
    read_run<T, kVector>(a, lane, shared);
  } else {
    read_queries<T, kVector>(a, blockIdx.x - runs, lane, shared);
  }
}

}  // namespace distr::cuda::energy
