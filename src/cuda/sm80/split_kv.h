// SPDX-License-Identifier: Apache-2.0
// Split-KV: tiles of queries that would leave SMs idle are given to several thread blocks, which take a split of the
// keys each; combine_splits() combines their partial results.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "distr/problem.h"

namespace distr::cuda::sm80 {

struct SplitKv {
  unsigned begin = 0, end = 0;  // tiles of queries that are split
  unsigned num_splits = 1;      // thread blocks of each
  float* o = nullptr;           // [partials, rows, dim]; a partial for each of these blocks
  float2* row_stats = nullptr;  // [partials, rows]: row max and row sum

  // What a thread block of the launch takes: split `index` of `count` of a tile's keys.
  struct Split {
    unsigned tile, index, count;
  };
  [[nodiscard]] __host__ __device__ Split at(unsigned cta) const noexcept {
    const unsigned past = cta - begin;
    return cta < begin                         ? Split{cta, 0, 1}
           : past < (end - begin) * num_splits ? Split{begin + past / num_splits, past % num_splits, num_splits}
                                               : Split{cta - (end - begin) * (num_splits - 1), 0, 1};
  }
  [[nodiscard]] std::int64_t ctas() const noexcept { return std::int64_t{end - begin} * num_splits; }
};

struct ForwardParameters;

// O and LSE of the split tiles from their partial results, for tiles of `rows` queries and O padded to `dim` columns.
// sequences: Config::kSequences of the kernel that left them.
void combine_splits(const ForwardParameters& parameters, DType dtype, int rows, int dim, bool sequences, void* stream);

}  // namespace distr::cuda::sm80
