// SPDX-License-Identifier: Apache-2.0
// The tiles of queries of a launch, and which queries belong to each.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/element.h"
#include "cuda/divisor.cuh"
#include "cuda/problem.h"

namespace distr::cuda {

// The queries of a tile.
struct Rows {
  int batch, head, head_kv;
  int row;  // the first
};

// The tiles of all heads, in the order that thread blocks take them: head after head, so that blocks that run together
// read the same K and V, each from its last rows on. Those of the last `together` heads are taken by turns, so that
// where it is causal the longest come first and the shortest end all. What a thread block finds its tile by is in the
// form that takes it least time, for nothing else runs until it has it.
class Tiles {
 public:
  Tiles() = default;
  // Of `rows` queries each, from begin to end - 1. `together`: not more heads than there are.
  Tiles(const DeviceProblem& problem, int together, std::int64_t begin, std::int64_t end, int rows)
      : heads_q_(static_cast<unsigned>(problem.heads_q)),
        heads_of_kv_(static_cast<unsigned>(problem.heads_q / problem.heads_kv)),
        together_(static_cast<unsigned>(together)),
        of_head_(static_cast<unsigned>(of_head(begin, end, rows))),
        heads_before_(static_cast<unsigned>(problem.batch * problem.heads_q) - static_cast<unsigned>(together)),
        count_(static_cast<unsigned>(problem.batch * problem.heads_q * of_head(begin, end, rows))),
        last_row_(static_cast<int>(begin) + (static_cast<int>(of_head_.value()) - 1) * rows),
        rows_(rows) {}

  [[nodiscard]] static std::int64_t of_head(std::int64_t begin, std::int64_t end, std::int64_t rows) {
    return common::ceil_div(end - begin, rows);
  }
  [[nodiscard]] unsigned count() const { return count_; }

  [[nodiscard]] __host__ __device__ Rows at(unsigned index) const {
    const unsigned before = heads_before_ * of_head_.value();
    const bool is_before = index < before;
    const unsigned head =
        is_before ? index / of_head_ : heads_before_ + (index - before) % together_;    // of all batches
    const unsigned turn = is_before ? index % of_head_ : (index - before) / together_;  // tiles of its head before it
    const unsigned of_batch = head % heads_q_;
    return {static_cast<int>(head / heads_q_), static_cast<int>(of_batch), static_cast<int>(of_batch / heads_of_kv_),
            last_row_ - static_cast<int>(turn) * rows_};
  }

 private:
  Divisor heads_q_, heads_of_kv_;  // of a batch, and of a KV head
  Divisor together_, of_head_;     // heads at the end, and tiles of a head
  unsigned heads_before_ = 0;
  unsigned count_ = 0;
  int last_row_ = 0;  // a head's last tile's first query
  int rows_ = 0;
};

}  // namespace distr::cuda
