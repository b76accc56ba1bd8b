// SPDX-License-Identifier: Apache-2.0
// packed[row, c] = source[row, c], and 0 for the columns that were added
//
// A thread makes 8 columns of a row, 16 bytes; neighbours make the next ones. It reads the source element by element,
// for its rows may begin anywhere. No shared memory; bound by memory, and only for tensors that kernels cannot read as
// they are.
#include "cuda/prepare/operand.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/element.h"
#include "cuda/launch.h"
#include "cuda/tile.cuh"

namespace distr::cuda {
namespace {

constexpr int kPackThreads = 256;

// One thread a chunk of the packed tensor.
__global__ void pack_kernel(const std::uint16_t* source, Strides strides, Extent extent, uint4* packed) {
  const std::int64_t chunks = (extent.columns + kChunk - 1) / kChunk;
  const std::int64_t index = std::int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
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

void pack(const void* source, const Strides& strides, const Extent& extent, void* packed, void* stream) {
  const std::int64_t chunks = packed_count(extent) / kChunk;
  if (chunks > 0) {
    const auto blocks = static_cast<unsigned>(common::ceil_div(chunks, std::int64_t{kPackThreads}));
    launch(pack_kernel, dim3(blocks), kPackThreads, 0, stream, static_cast<const std::uint16_t*>(source), strides,
           extent, static_cast<uint4*>(packed));
  }
}

}  // namespace

std::string unsupported_grid_reason(const Problem& problem) {
  constexpr std::int64_t kRows = 64;
  constexpr double kSplitBlocks = 1 << 20;  // that may be added where tiles are split
  const std::int64_t tiles = common::ceil_div(std::max(problem.seq_q, problem.seq_k), kRows);
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

bool suits_cp_async(const Strides& strides, const Extent& extent) noexcept {
  constexpr std::int64_t kMaxRowStride = std::int64_t{1} << 24;
  return has_aligned_rows(strides) && strides.row >= 0 && strides.row < kMaxRowStride && extent.columns % kChunk == 0;
}

Input::Input(const char* name, const Strides& strides, const Extent& extent, bool as_it_is, WorkspaceLayout& workspace)
    : name_(name), strides_(strides), extent_(extent) {
  if (!as_it_is) {
    copy_ = Part<std::uint16_t>(workspace, name, packed_count(extent));
  }
}

Operand Input::read(const void* tensor, void* workspace, void* stream) const {
  if (copy_.exists()) {
    pack(tensor, strides_, extent_, copy_.in(workspace), stream);
    return packed(copy_.in(workspace), extent_);
  }
  if (reinterpret_cast<std::uintptr_t>(tensor) % 16 != 0) {
    throw Error(Status::invalid_argument, std::string(name_) + " is not aligned; allowed: addresses that 16 divides");
  }
  return {tensor, strides_, extent_};
}

}  // namespace distr::cuda
