// SPDX-License-Identifier: Apache-2.0
// Which queries belong to a tile.
#pragma once

#include <cuda_runtime.h>

#include "cuda/problem.h"

namespace distr::cuda {

struct Rows {
  int batch, head, head_kv;
  int row;  // the tile's first query

  // Of the index-th tile of `rows` queries. Section after section of heads, the short one first; in each, the last rows
  // first, which are the longest where it is causal. Parameters: problem, section, row_begin, row_end.
  template <class Parameters>
  __host__ __device__ static Rows of(unsigned index, int rows, const Parameters& p) {
    const DeviceProblem& problem = p.problem;
    const auto tiles = static_cast<unsigned>((p.row_end - p.row_begin + rows - 1) / rows);  // of a head
    const auto all_heads = static_cast<unsigned>(problem.batch * problem.heads_q);
    const auto section = static_cast<unsigned>(p.section);
    unsigned heads = (all_heads - 1) % section + 1;  // of the first section
    unsigned first = 0;
    if (index >= heads * tiles) {
      index -= heads * tiles;
      const unsigned sections = index / (section * tiles);
      first = heads + sections * section;
      index -= sections * section * tiles;
      heads = section;
    }
    const int batch_head = static_cast<int>(first + index % heads);
    Rows result{};
    const auto heads_q = static_cast<int>(problem.heads_q);
    result.batch = batch_head / heads_q;
    result.head = batch_head % heads_q;
    result.head_kv = result.head / (heads_q / static_cast<int>(problem.heads_kv));
    result.row = static_cast<int>(p.row_begin) + static_cast<int>(tiles - 1 - index / heads) * rows;
    return result;
  }
};

}  // namespace distr::cuda
