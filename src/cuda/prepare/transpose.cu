// SPDX-License-Identifier: Apache-2.0
// K^T[c, j] = K[j, c]: a block takes 64 keys of 64 columns. A thread reads 8 columns of two neighbouring keys, 16 bytes
//   each, and leaves pairs of keys in shared memory, tile[key / 2][column]; then a thread writes 8 keys of a column, 16
//   bytes. Keys past the last, and the row past the last column, are zero: kernels read them instead of testing. That
//   row may be a 65th of the tile, whose threads write it as well.
#include "cuda/prepare/transpose.h"

#include "common/element.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda {
namespace {

constexpr int kTransposeThreads = 256;

constexpr int kSide = 64;  // of the tiles that are transposed

// One block a tile [kSide keys][kSide columns]. `tile` holds it with the keys in pairs, so that both sides of the
// transposition move words: tile[key / 2][column] = (key even, key odd).
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const std::uint16_t* k, Strides strides, Extent extent, bool aligned, std::int64_t stride,
                     uint4* kt) {
  constexpr int kChunks = kSide / kChunk;
  __shared__ std::uint32_t tile[kSide / 2][kSide + 1];
  launch_dependent_grids();
  wait_on_dependent_grids();
  const auto key_tiles = static_cast<unsigned>(stride / kSide);
  const auto column_tiles = static_cast<unsigned>((extent.columns + kSide - 1) / kSide);
  const std::int64_t first_key = std::int64_t{blockIdx.x % key_tiles} * kSide;
  const std::int64_t first_column = std::int64_t{blockIdx.x / key_tiles % column_tiles} * kSide;
  const std::int64_t head = blockIdx.x / key_tiles / column_tiles;
  const std::uint16_t* from = k + head / extent.heads * strides.batch + head % extent.heads * strides.head;

  // A thread takes 8 columns of 2 keys.
  const int pair = static_cast<int>(threadIdx.x) / kChunks;
  const std::int64_t column = first_column + static_cast<int>(threadIdx.x) % kChunks * kChunk;
  std::uint32_t words[2][kChunk / 2] = {};  // of the even and the odd key, two columns a word
  for (int odd = 0; odd < 2; ++odd) {
    const std::int64_t key = first_key + 2 * pair + odd;
    if (key >= extent.rows) {
      continue;
    }
    const std::uint16_t* row = from + key * strides.row;
    if (aligned && column + kChunk <= extent.columns) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(row + column);
      words[odd][0] = chunk.x;
      words[odd][1] = chunk.y;
      words[odd][2] = chunk.z;
      words[odd][3] = chunk.w;
    } else {
      for (int i = 0; i < kChunk && column + i < extent.columns; ++i) {
        words[odd][i / 2] |= static_cast<std::uint32_t>(row[column + i]) << (i % 2 * 16);
      }
    }
  }
  for (int i = 0; i < kChunk / 2; ++i) {
    const int at = static_cast<int>(threadIdx.x) % kChunks * kChunk + 2 * i;
    tile[pair][at] = __byte_perm(words[0][i], words[1][i], 0x5410);
    tile[pair][at + 1] = __byte_perm(words[0][i], words[1][i], 0x7632);
  }
  if (threadIdx.x % kChunks == 0) {
    tile[pair][kSide] = 0;
  }
  __syncthreads();

  // A thread writes 8 keys of a column, twice, and some a third time: the row of zeros.
  for (int i = static_cast<int>(threadIdx.x); i < (kSide + 1) * kChunks; i += kTransposeThreads) {
    const int chunk = i % kChunks;
    const int at = i / kChunks;
    const std::int64_t to = first_column + at;
    if (at < kSide ? to <= extent.columns : to == extent.columns) {
      kt[((head * (extent.columns + 1) + to) * stride + first_key) / kChunk + chunk] = {
          tile[chunk * 4][at], tile[chunk * 4 + 1][at], tile[chunk * 4 + 2][at], tile[chunk * 4 + 3][at]};
    }
  }
}

}  // namespace

std::int64_t transposed_stride(std::int64_t keys) noexcept { return (keys + kSide - 1) / kSide * kSide; }

std::int64_t transposed_count(const Extent& k) noexcept {
  return k.batch * k.heads * (k.columns + 1) * transposed_stride(k.rows);
}

void transpose(const Operand& k, void* kt, void* stream) {
  const Extent& extent = k.extent;
  const std::int64_t stride = transposed_stride(extent.rows);
  const std::int64_t column_tiles = common::ceil_div(extent.columns, std::int64_t{kSide});
  const std::int64_t tiles = extent.batch * extent.heads * (stride / kSide) * column_tiles;
  if (tiles > 0) {
    const bool aligned = has_aligned_rows(k.strides) && reinterpret_cast<std::uintptr_t>(k.data) % 16 == 0;
    launch_dependent(transpose_kernel, dim3(static_cast<unsigned>(tiles)), kTransposeThreads, 0, stream,
                     static_cast<const std::uint16_t*>(k.data), k.strides, extent, aligned, stride,
                     static_cast<uint4*>(kt));
  }
}

}  // namespace distr::cuda
