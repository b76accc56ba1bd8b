// SPDX-License-Identifier: Apache-2.0
// The tile scheduler of the forward kernels: which queries a thread block computes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/element.h"
#include "cuda/divisor.cuh"
#include "cuda/problem.h"

namespace distr::cuda {

// The queries of one tile.
struct WorkTile {
  int batch, head, head_kv;
  int row;  // the first query
};

// The tiles of all heads, in the order in which thread blocks take them. They go head after head, so that blocks that
// run at the same time read the same K and V, and within a head from the last rows to the first. The tiles of the last
// `interleaved` heads are interleaved, so that in causal attention their longest tiles come first and the launch ends
// with the shortest. A thread block cannot start before it knows its tile, so the members are those from which it finds
// its tile quickest.
class TileScheduler {
 public:
  TileScheduler() = default;
  // Tiles of `rows` queries each, from query `begin` to end - 1. `interleaved` is at most the number of heads.
  TileScheduler(const DeviceProblem& problem, int interleaved, std::int64_t begin, std::int64_t end, int rows)
      : heads_q_(static_cast<unsigned>(problem.heads_q)),
        heads_of_kv_(static_cast<unsigned>(problem.heads_q / problem.heads_kv)),
        interleaved_(static_cast<unsigned>(interleaved)),
        of_head_(static_cast<unsigned>(of_head(begin, end, rows))),
        heads_before_(static_cast<unsigned>(problem.batch * problem.heads_q) - static_cast<unsigned>(interleaved)),
        count_(static_cast<unsigned>(problem.batch * problem.heads_q * of_head(begin, end, rows))),
        last_row_(static_cast<int>(begin) + (static_cast<int>(of_head_.value()) - 1) * rows),
        rows_(rows) {}

  [[nodiscard]] static std::int64_t of_head(std::int64_t begin, std::int64_t end, std::int64_t rows) {
    return common::ceil_div(end - begin, rows);
  }
  [[nodiscard]] unsigned count() const { return count_; }

  [[nodiscard]] __host__ __device__ WorkTile at(unsigned index) const {
    const unsigned before = heads_before_ * of_head_.value();
    const bool is_before = index < before;
    const unsigned head =
        is_before ? index / of_head_ : heads_before_ + (index - before) % interleaved_;  // of all batches
    const unsigned in_head =
        is_before ? index % of_head_ : (index - before) / interleaved_;  // tiles of its head before it
    const unsigned of_batch = head % heads_q_;
    return {static_cast<int>(head / heads_q_), static_cast<int>(of_batch), static_cast<int>(of_batch / heads_of_kv_),
            last_row_ - static_cast<int>(in_head) * rows_};
  }

 private:
  Divisor heads_q_, heads_of_kv_;  // query heads of a batch, and of a KV head
  Divisor interleaved_, of_head_;  // interleaved heads at the end, and tiles of a head
  unsigned heads_before_ = 0;
  unsigned count_ = 0;
  int last_row_ = 0;  // first query of a head's last tile
  int rows_ = 0;
};

}  // namespace distr::cuda
