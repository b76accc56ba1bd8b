// SPDX-License-Identifier: Apache-2.0
// packed[row, c] = source[row, c], and 0 for the columns that were added: one thread 8 columns.
// K^T[c, j] = K[j, c]: a block takes 64 keys of 64 columns. A thread reads 8 columns of two neighbouring keys, 16 bytes
//   each, and leaves pairs of keys in shared memory, tile[key / 2][column]; then a thread writes 8 keys of a column, 16
//   bytes. Keys past the last, and the row past the last column, are zero: kernels read them instead of testing. That
//   row may be a 65th of the tile, whose threads write it as well.
// k_hat^T[g, j] = sum of K^T[c, j] over the columns c of group g, in fp32: one thread 8 keys.
#include "cuda/prepare.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "common/element.h"
#include "cuda/early.cuh"

namespace distr::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // elements of 16 bits in 16 bytes

[[nodiscard]] unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// One thread a chunk of the packed tensor.
__global__ void pack_kernel(const std::uint16_t* source, Strides strides, Extent extent, uint4* packed) {
  const std::int64_t chunks = (extent.columns + kChunk - 1) / kChunk;
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = index / chunks;  // of batch * heads * rows
  if (row >= extent.batch * extent.heads * extent.rows) {
    return;
  }
  const std::int64_t head = row / extent.rows;
  const std::uint16_t* from = source + head / extent.heads * strides.batch + head % extent.heads * strides.head +
                              row % extent.rows * strides.row;
  std::uint32_t pairs[kChunk / 2];
  const std::int64_t column = index % chunks * kChunk;
  for (int i = 0; i < kChunk / 2; ++i) {
    const std::uint32_t low = column + 2 * i < extent.columns ? from[column + 2 * i] : 0;
    const std::uint32_t high = column + 2 * i + 1 < extent.columns ? from[column + 2 * i + 1] : 0;
    pairs[i] = low | high << 16;
  }
  packed[index] = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

constexpr int kSide = 64;  // of the tiles that are transposed

// One block a tile [kSide keys][kSide columns]. `tile` holds it with the keys in pairs, so that both sides of the
// transposition move words: tile[key / 2][column] = (key even, key odd).
__global__ void __launch_bounds__(kThreads) transpose_kernel(const std::uint16_t* k, Strides strides, Extent extent,
                                                             bool aligned, std::int64_t stride, uint4* kt) {
  constexpr int kChunks = kSide / kChunk;
  __shared__ std::uint32_t tile[kSide / 2][kSide + 1];
  release_dependent();
  wait_for_inputs();
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
  for (int i = static_cast<int>(threadIdx.x); i < (kSide + 1) * kChunks; i += kThreads) {
    const int chunk = i % kChunks;
    const int at = i / kChunks;
    const std::int64_t to = first_column + at;
    if (at < kSide ? to <= extent.columns : to == extent.columns) {
      kt[((head * (extent.columns + 1) + to) * stride + first_key) / kChunk + chunk] = {
          tile[chunk * 4][at], tile[chunk * 4 + 1][at], tile[chunk * 4 + 2][at], tile[chunk * 4 + 3][at]};
    }
  }
}

// One thread a chunk of 8 keys of one group.
template <class T>
__global__ void fuse_kernel(const uint4* kt, const std::int32_t* order, Fusion fusion, uint4* fused) {
  const std::int64_t chunks = fusion.stride / kChunk;
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = index / chunks;  // of batch * heads_q * (groups + 1)
  const std::int64_t head = row / (fusion.groups + 1);
  if (head >= fusion.batch * fusion.heads_q) {
    return;
  }
  const std::int64_t b = head / fusion.heads_q;
  const std::int64_t head_kv = head % fusion.heads_q / (fusion.heads_q / fusion.heads_kv);
  const uint4* from = kt + (b * fusion.heads_kv + head_kv) * (fusion.columns + 1) * chunks + index % chunks;
  const std::int64_t begin = row % (fusion.groups + 1) * fusion.members;
  float sums[kChunk] = {};
  for (std::int64_t i = begin; i < min(begin + fusion.members, fusion.columns); ++i) {
    const uint4 chunk = from[order[head * fusion.columns + i] * chunks];
    const auto* elements = reinterpret_cast<const T*>(&chunk);
    for (int e = 0; e < kChunk; ++e) {
      sums[e] += static_cast<float>(elements[e]);
    }
  }
  uint4 result;
  auto* elements = reinterpret_cast<T*>(&result);
  for (int e = 0; e < kChunk; ++e) {
    elements[e] = T(sums[e]);
  }
  fused[index] = result;
}

}  // namespace

std::string grid_refusal(const Problem& problem) {
  constexpr double kSplitBlocks = 1 << 20;  // that may be added where tiles are split
  const std::int64_t tiles = common::ceil_div(std::max(problem.seq_q, problem.seq_k), std::int64_t{kSide});
  const double heads =
      static_cast<double>(problem.batch) * static_cast<double>(problem.heads_q);  // int64 could overflow
  return heads * static_cast<double>(tiles) + kSplitBlocks > std::numeric_limits<std::int32_t>::max()
             ? "the grid would have more than 2147483647 tiles of 64 rows"
             : "";
}

bool has_aligned_rows(const Strides& strides) noexcept {
  return strides.batch % kChunk == 0 && strides.head % kChunk == 0 && strides.row % kChunk == 0;
}

std::int64_t packed_columns(std::int64_t columns) noexcept { return (columns + kChunk - 1) / kChunk * kChunk; }

std::int64_t packed_count(const Extent& extent) noexcept {
  return extent.batch * extent.heads * extent.rows * packed_columns(extent.columns);
}

Strides packed_strides(const Extent& extent) noexcept {
  const std::int64_t row = packed_columns(extent.columns);
  return {extent.heads * extent.rows * row, extent.rows * row, row};
}

void pack(const void* source, const Strides& strides, const Extent& extent, void* packed, void* stream) {
  const std::int64_t chunks = packed_count(extent) / kChunk;
  if (chunks > 0) {
    launch(pack_kernel, dim3(blocks_for(chunks)), kThreads, 0, stream, static_cast<const std::uint16_t*>(source),
           strides, extent, static_cast<uint4*>(packed));
  }
}

bool is_taken_by_rows(const Strides& strides, const Extent& extent) noexcept {
  constexpr std::int64_t kMaxRowStride = std::int64_t{1} << 24;
  return has_aligned_rows(strides) && strides.row >= 0 && strides.row < kMaxRowStride && extent.columns % kChunk == 0;
}

Operand::Operand(const Strides& given, const Extent& size, bool as_it_is, Workspace& workspace)
    : strides(given), extent(size), copy(as_it_is ? nullptr : workspace.take<std::uint16_t>(packed_count(size))) {}

void Operand::read(const void* tensor, const char* name, void* stream) {
  data = tensor;
  if (copy != nullptr) {
    pack(tensor, strides, extent, copy, stream);
    data = copy;
    strides = packed_strides(extent);
  } else if (reinterpret_cast<std::uintptr_t>(tensor) % 16 != 0) {
    throw Error(Status::invalid_argument, std::string(name) + " is not aligned; allowed: addresses that 16 divides");
  }
}

std::int64_t column_stride(std::int64_t keys) noexcept { return (keys + kSide - 1) / kSide * kSide; }

void transpose(const void* k, const Strides& strides, const Extent& extent, void* kt, void* stream) {
  const std::int64_t stride = column_stride(extent.rows);
  const std::int64_t column_tiles = common::ceil_div(extent.columns, std::int64_t{kSide});
  const std::int64_t tiles = extent.batch * extent.heads * (stride / kSide) * column_tiles;
  if (tiles > 0) {
    const bool aligned = has_aligned_rows(strides) && reinterpret_cast<std::uintptr_t>(k) % 16 == 0;
    launch_early(transpose_kernel, dim3(static_cast<unsigned>(tiles)), kThreads, 0, stream,
                 static_cast<const std::uint16_t*>(k), strides, extent, aligned, stride, static_cast<uint4*>(kt));
  }
}

void fuse(const void* kt, const std::int32_t* order, const Fusion& fusion, void* fused, void* stream) {
  const std::int64_t chunks = fusion.batch * fusion.heads_q * (fusion.groups + 1) * (fusion.stride / kChunk);
  if (chunks > 0) {
    launch(fusion.dtype == DType::f16 ? fuse_kernel<__half> : fuse_kernel<__nv_bfloat16>, dim3(blocks_for(chunks)),
           kThreads, 0, stream, static_cast<const uint4*>(kt), order, fusion, static_cast<uint4*>(fused));
  }
}

}  // namespace distr::cuda
