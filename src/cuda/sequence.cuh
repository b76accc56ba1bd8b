// SPDX-License-Identifier: Apache-2.0
// Lengths that are data (on the host common/sequence.h): a thread block makes the problem of its own batch entry, in
// shared memory, and goes on as if that were all there is.
#pragma once

#include <cstdint>

#include "cuda/lengths.h"
#include "cuda/near.cuh"
#include "cuda/problem.h"

namespace distr::cuda {

// The rows and the keys of one batch entry. Nothing has looked at the lengths before: they are clamped, so that nothing
// is read outside of the tensors.
struct DeviceSequence {
  int first_row, rows;
  int first_key, keys;

  __device__ DeviceSequence(const DeviceProblem& problem, const DeviceLengths& lengths, std::int64_t b)
      : first_row(0), rows(static_cast<int>(problem.seq_q)), first_key(0), keys(static_cast<int>(problem.seq_k)) {
    if (lengths.packed) {
      find(lengths.of.starts_q + b, lengths.total_q, first_row, rows);
      find(lengths.of.starts_k + b, lengths.total_k, first_key, keys);
    } else if (lengths.of.keys != nullptr) {
      keys = min(max(lengths.of.keys[b], 0), keys);
    }
  }

 private:
  // From the longest length there may be to the sequence's own.
  __device__ static void find(const std::int32_t* starts, int total, int& first, int& length) {
    first = min(max(starts[0], 0), total);
    length = min(min(max(starts[1], first), total) - first, length);
  }
};

// How far the corner that causality and a window count from is from that of the longest lengths.
[[nodiscard]] __device__ inline std::int64_t corner_shift(const DeviceProblem& problem, const DeviceLengths& lengths,
                                                          const DeviceSequence& sequence) {
  return lengths.at_bottom_right ? (sequence.keys - problem.seq_k) - (sequence.rows - problem.seq_q) : 0;
}

// Makes the problem of all entries that of one.
__device__ inline void enter(DeviceProblem& problem, const DeviceLengths& lengths, const DeviceSequence& sequence) {
  const std::int64_t shift = corner_shift(problem, lengths, sequence);
  problem.causal_offset += shift;
  problem.first_offset += has_left_end(problem) ? shift : 0;
  problem.batch = 1;
  problem.seq_q = sequence.rows;
  problem.seq_k = sequence.keys;
}

// Where entry b begins in a tensor of these strides, in elements; `first`: its first row or key there.
__device__ inline std::int64_t entry_offset(const DeviceLengths& lengths, const Strides& strides, std::int64_t b,
                                            int first) {
  return lengths.packed ? first * strides.row : b * strides.batch;
}

// The distance of LSE's heads, and where entry b begins there.
[[nodiscard]] __host__ __device__ inline std::int64_t lse_stride(const DeviceLengths& lengths,
                                                                 const DeviceProblem& problem) {
  return lengths.packed ? lengths.total_q : problem.seq_q;
}
__device__ inline std::int64_t lse_offset(const DeviceLengths& lengths, const DeviceProblem& problem, std::int64_t b,
                                          int first_row) {
  return lengths.packed ? first_row : b * problem.heads_q * problem.seq_q;
}

// Packed sequences in tiles of so many rows. Those of sequence b begin with tile starts[b] / rows + b, which leaves
// room for all of its own, so nobody adds up the tiles of those before. Some tiles have no rows.
struct PackedTile {
  int sequence;
  int number;  // of its sequence's
};

[[nodiscard]] inline std::int64_t count_packed_tiles(std::int64_t total, std::int64_t sequences, std::int64_t rows) {
  return total / rows + sequences;
}

// All lanes of a warp call it, and look at 32 of the sequences at a time. Whatever the starts are, it is one of them,
// but then the tile's number may be none of its own.
[[nodiscard]] __device__ inline PackedTile find_packed_tile(const std::int32_t* starts, int sequences, int tile,
                                                            int rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto first_tile = [&](int b) { return starts[b] / rows + b; };
  int first = 0;  // of `sequences` ones, one of which it is
  while (sequences > 1) {
    const int step = (sequences + 31) / 32;
    const bool is_before = lane == 0 || (lane * step < sequences && first_tile(first + lane * step) <= tile);
    const int passed = __popc(__ballot_sync(~0U, is_before)) - 1;
    first += passed * step;
    sequences = min(step, sequences - passed * step);
  }
  return {first, tile - first_tile(first)};
}

// Vectors in which every packed sequence begins at a multiple of kPaddedRows: how many rows those of a head have, and
// where sequence b begins. It has room for its rows up to such a multiple.
inline constexpr std::int64_t kPaddedRows = 128;

[[nodiscard]] inline std::int64_t padded_rows(std::int64_t total, std::int64_t sequences) noexcept {
  return (total / kPaddedRows + sequences + 1) * kPaddedRows;
}
[[nodiscard]] __device__ inline std::int64_t padded_start(std::int64_t b, int first_row) {
  return (first_row / kPaddedRows + b) * kPaddedRows;
}

// What a kernel that has lengths is launched with, in shared memory, where it is changed into what one entry has.
template <class Parameters>
struct OwnParameters {
  alignas(16) std::uint8_t bytes[sizeof(Parameters)];

  // All threads call it. change(parameters) is called by one of them, and all see what it did.
  template <class Change>
  __device__ const Parameters& make(const Parameters& launched, const Change& change) {
    static_assert(sizeof(Parameters) % sizeof(std::uint32_t) == 0);
    auto* const to = reinterpret_cast<std::uint32_t*>(bytes);
    const auto* const from = reinterpret_cast<const std::uint32_t*>(&launched);
    for (unsigned n = threadIdx.x; n < sizeof(Parameters) / sizeof(std::uint32_t); n += blockDim.x) {
      to[n] = from[n];
    }
    __syncthreads();
    auto& own = reinterpret_cast<Parameters&>(bytes);
    if (threadIdx.x == 0) {
      change(own);
    }
    __syncthreads();
    return own;
  }
};

template <class T>
__device__ void advance(const void*& pointer, std::int64_t elements) {
  pointer = static_cast<const T*>(pointer) + elements;
}
template <class T>
__device__ void advance(void*& pointer, std::int64_t elements) {
  pointer = static_cast<T*>(pointer) + elements;
}

}  // namespace distr::cuda
