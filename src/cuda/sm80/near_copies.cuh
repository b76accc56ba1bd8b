// SPDX-License-Identifier: Apache-2.0
// The copies of K^T and V of a half to shared memory, by cp.async (near.cuh).
#pragma once

#include <cstdint>

#include "cuda/sm80/near_storage.cuh"
#include "cuda/sm80/queries.cuh"

namespace distr::cuda::sm80 {

// A thread copies a chunk of 16 bytes of every 16th row of K^T, and of some rows of V. Where these begin is kept in
// registers, where there are enough; else it is read from shared memory for each half.
template <class C>
class HalfCopies {
 public:
  static constexpr bool kKeepsPlaces = C::kRowTiles * C::kDim == 128;  // less leaves 128 registers, more none

  // Once the state and the columns are in shared memory.
  __device__ HalfCopies(const NearParameters& parameters, NearStorage<C>& storage)
      : parameters_(parameters), storage_(storage) {
    if constexpr (kKeepsPlaces) {
      const DeviceProblem& problem = parameters.forward.problem;
      const int chunk = thread() % kValueChunks;
      keys_ = first_keys();
      values_ = reinterpret_cast<const char*>(row_of(storage.state.values, problem.v.row, thread() / kValueChunks) +
                                              chunk * kChunk);
      values_end_ = chunk * kChunk < problem.head_dim_v ? static_cast<int>(problem.seq_k) : 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        offsets_[step] = offset_of(storage.columns[thread() / kKeyChunks][step]);
      }
    }
  }

  // Issues those of a half, of K^T of the first 16 steps positions, and commits them. Half -1 is none.
  __device__ void issue(int half, int stage, int steps) const {
    if (half >= 0) {
      copy_keys(half, stage, steps);
      copy_values(half, stage);
    }
    ptx::cp_async_commit();
  }

 private:
  static constexpr int kSteps = C::kDim / 16;
  static constexpr int kKeyChunks = C::kKeys / kChunk;   // of a row of K^T
  static constexpr int kValueChunks = C::kDim / kChunk;  // of a row of V
  static_assert(C::kThreads / kKeyChunks == 16);

  [[nodiscard]] __device__ static int thread() { return static_cast<int>(ptx::opaque(threadIdx.x)); }

  // The first half's chunk of this thread, in row 0 of K^T.
  [[nodiscard]] __device__ const char* first_keys() const {
    return reinterpret_cast<const char*>(storage_.state.keys + thread() % kKeyChunks * kChunk);
  }
  // From row 0 of K^T to a column's, in bytes: below 2^32, as the sequence is below 2^22.
  [[nodiscard]] __device__ std::uint32_t offset_of(std::uint32_t column) const {
    return column * static_cast<std::uint32_t>(parameters_.forward.column_stride * 2);
  }

  __device__ void copy_keys(int half, int stage, int steps) const {
    const int row = thread() / kKeyChunks;
    const std::uint32_t to = key_tile<C>(storage_, stage).at(row, thread() % kKeyChunks);
    const char* const from = (kKeepsPlaces ? keys_ : first_keys()) + half * (C::kKeys * 2);
#pragma unroll
    for (int first = 0; first < kSteps; first += 4) {
      if (first == 0 || first < steps) {
        const auto* const columns = reinterpret_cast<const std::uint32_t*>(&storage_.columns[row][first]);
        const std::uint32_t four = kKeepsPlaces ? 0 : *columns;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::uint32_t offset = kKeepsPlaces ? offsets_[first + i] : offset_of(four >> 8 * i & 255);
          ptx::cp_async_16_if(first + i < steps, Tile<C::kKeys>::move(to, (first + i) * 16, 0), from + offset);
        }
      }
    }
  }

  __device__ void copy_values(int half, int stage) const {
    const DeviceProblem& problem = parameters_.forward.problem;
    const Tile<C::kDim> tile = value_tile<C>(storage_, stage);
    const int key = half * C::kKeys;
    if constexpr (!kKeepsPlaces) {
      copy_tile<C::kKeys, C::kDim, C::kThreads>(tile, row_of(storage_.state.values, problem.v.row, key), problem.v.row,
                                                rows_left(key, problem.seq_k), problem.head_dim_v);
      return;
    }
    const int first = thread() / kValueChunks;
    const auto row_bytes = static_cast<std::uint32_t>(problem.v.row) * 2;
    copy_chunks<C::kKeys, C::kDim, C::kThreads>(
        tile.at(first, thread() % kValueChunks),
        values_ + static_cast<std::uint64_t>(static_cast<std::uint32_t>(key)) * row_bytes, row_bytes,
        rows_left(key + first, values_end_));
  }

  const NearParameters& parameters_;
  NearStorage<C>& storage_;
  const char *keys_ = nullptr, *values_ = nullptr;  // of the first half
  int values_end_ = 0;                              // keys whose values have this chunk
  std::uint32_t offsets_[kSteps]{};                 // of this thread's rows of K^T
};

}  // namespace distr::cuda::sm80
