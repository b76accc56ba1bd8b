// SPDX-License-Identifier: Apache-2.0
// The tiles of queries of a launch, and which queries belong to each.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/divisor.cuh"
#include "cuda/problem.h"

namespace distr::cuda {

// The queries of a tile.
struct Rows {
  int batch, head, head_kv;
  int row;  // the first
};

// The tiles of all heads, in the order that thread blocks take them: section after section of heads, the short one
// first; in each, the last rows first, which are the longest where it is causal. What a thread block finds its tile by
// is in the form that takes it least time, for nothing else runs until it has it.
class Tiles {
 public:
  Tiles() = default;
  // Of `rows` queries each, from begin to end - 1; sections of so many heads.
  Tiles(const DeviceProblem& problem, int section, std::int64_t begin, std::int64_t end, int rows)
      : heads_q_(static_cast<unsigned>(problem.heads_q)),
        heads_of_kv_(static_cast<unsigned>(problem.heads_q / problem.heads_kv)),
        first_heads_((all_heads(problem) - 1) % static_cast<unsigned>(section) + 1),
        section_heads_(static_cast<unsigned>(section)),
        of_head_(static_cast<unsigned>((end - begin + rows - 1) / rows)),
        of_section_(section_heads_.value() * of_head_),
        count_(all_heads(problem) * of_head_),
        last_row_(static_cast<int>(begin) + (static_cast<int>(of_head_) - 1) * rows),
        rows_(rows) {}

  [[nodiscard]] unsigned count() const { return count_; }

  [[nodiscard]] __host__ __device__ Rows at(unsigned index) const {
    unsigned head = 0;  // of all batches
    unsigned turn = 0;  // tiles of this head before this one
    const unsigned of_first = first_heads_.value() * of_head_;
    if (index < of_first) {
      turn = index / first_heads_;
      head = index % first_heads_;
    } else {
      const unsigned section = (index - of_first) / of_section_;
      const unsigned in_section = (index - of_first) % of_section_;
      turn = in_section / section_heads_;
      head = first_heads_.value() + section * section_heads_.value() + in_section % section_heads_;
    }
    const unsigned of_batch = head % heads_q_;
    return {static_cast<int>(head / heads_q_), static_cast<int>(of_batch), static_cast<int>(of_batch / heads_of_kv_),
            last_row_ - static_cast<int>(turn) * rows_};
  }

 private:
  static unsigned all_heads(const DeviceProblem& problem) {
    return static_cast<unsigned>(problem.batch * problem.heads_q);
  }

  Divisor heads_q_, heads_of_kv_;        // of a batch, and of a KV head
  Divisor first_heads_, section_heads_;  // of the first section, and of each other
  unsigned of_head_ = 0;
  Divisor of_section_;  // tiles of each section but the first
  unsigned count_ = 0;
  int last_row_ = 0;  // a head's last tile's first query
  int rows_ = 0;
};

}  // namespace distr::cuda
