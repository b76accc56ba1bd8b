// SPDX-License-Identifier: Apache-2.0
// The tiles of queries that would not give every SM of the GPU as much to do are given to several thread blocks, which
// take a piece of the keys each; combine_splits() adds the pieces up.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "distr/problem.h"

namespace distr::cuda::sm80 {

struct SplitKv {
  unsigned begin = 0, end = 0;  // tiles of queries that are split
  unsigned pieces = 1;          // thread blocks of each
  float* o = nullptr;           // [their blocks, rows, dim]: sums of P V, not yet divided
  float2* row = nullptr;        // [their blocks, rows]: the row's reference, and its sum of P

  // What a thread block of the launch takes: piece `index` of `count` of a tile's keys.
  struct Piece {
    unsigned tile, index, count;
  };
  [[nodiscard]] __host__ __device__ Piece at(unsigned cta) const noexcept {
    const unsigned past = cta - begin;
    return cta < begin                     ? Piece{cta, 0, 1}
           : past < (end - begin) * pieces ? Piece{begin + past / pieces, past % pieces, pieces}
                                           : Piece{cta - (end - begin) * (pieces - 1), 0, 1};
  }
  [[nodiscard]] std::int64_t ctas() const noexcept { return std::int64_t{end - begin} * pieces; }
};

struct ForwardParameters;

// O and LSE of the split tiles from their pieces, for tiles of `rows` queries and O padded to `dim` columns.
void combine_splits(const ForwardParameters& parameters, DType dtype, int rows, int dim, void* stream);

}  // namespace distr::cuda::sm80
