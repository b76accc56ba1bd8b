// SPDX-License-Identifier: Apache-2.0
// Lengths that are data (cuda/sequence.cuh) in Hopper's kernels. A thread block of the forward finds its batch entry
// and keeps in shared memory what that has of its own. Everything else is a dense call's, for TMA ends where an entry
// does.
#pragma once

#include <cstdint>

#include "cuda/dependent_launch.cuh"
#include "cuda/near.cuh"
#include "cuda/sequence.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/pipeline.cuh"

namespace distr::cuda::sm90 {

// Row i of an entry of n rows, and what TMA's map has along its axis of rows (config.h).
[[nodiscard]] __device__ inline int row_before_end(int row, int rows) { return kEntryRows - rows + row; }

// Called by a warp. work: of the tiles of all entries, or where they are packed, of a batch of one.
template <class C>
__device__ inline void find_entry(const ForwardParameters& p, const WorkTile& work, BatchEntry& entry) {
  const DeviceLengths& lengths = p.lengths;
  int b = work.batch;
  std::int64_t row = work.row;
  if (lengths.packed) {
    const PackedTile tile =
        find_packed_tile(lengths.of.starts_q, static_cast<int>(p.problem.batch), work.row / C::kRows, C::kRows);
    b = tile.sequence;
    row = std::int64_t{tile.number} * C::kRows;
  }
  if (threadIdx.x != 0) {
    return;
  }
  const DeviceSequence sequence(p.problem, lengths, b);
  const std::int64_t shift = corner_shift(p.problem, lengths, sequence) - sequence.first_row;
  const bool has_rows = row >= 0 && row < sequence.rows;
  entry.keys = sequence.keys;
  entry.causal_offset = static_cast<int>(p.problem.causal_offset + shift);
  entry.first_offset = has_left_end(p.problem) ? static_cast<int>(p.problem.first_offset + shift) : 0;
  entry.row = sequence.first_row + static_cast<int>(has_rows ? row : 0);
  entry.row_end = has_rows ? sequence.first_row + sequence.rows : 0;
  entry.q_axis = lengths.packed ? entry.row_end : work.batch;
  entry.k_axis = sequence.first_key + sequence.keys + work.batch * p.entry_rows.k;
  entry.v_axis = sequence.first_key + sequence.keys + work.batch * p.entry_rows.v;
}

// From the tile of all entries to that of the block's own one. All threads call it; false: it has no rows.
template <class C>
[[nodiscard]] __device__ inline bool enter_entry(const ForwardParameters& p, WorkTile& work, BatchEntry& entry) {
  wait_on_dependent_grids();
  if (threadIdx.x < 32) {
    find_entry<C>(p, work, entry);
  }
  __syncthreads();
  work.row = entry.row;
  return entry.row < entry.row_end;
}

// Called by whole warps, so that the compiler knows that all threads have the same.
[[nodiscard]] __device__ __forceinline__ VisibleKeys visible_to(const BatchEntry& entry, const DeviceProblem& problem) {
  return {problem.causal, uniform(entry.keys), uniform(entry.causal_offset),
          has_left_end(problem) ? uniform(entry.first_offset) : -common::kUnlimited};
}

}  // namespace distr::cuda::sm90
