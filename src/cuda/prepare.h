// SPDX-License-Identifier: Apache-2.0
// What must happen once before a tensor-core kernel: tensors brought to 16-byte rows, columns of K made rows, and K
// fused where one grouping serves the whole sequence. Elements are of 16 bits.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"
#include "distr/problem.h"

namespace distr::cuda {

// Sizes of a tensor [batch, heads, rows, columns].
struct Extent {
  std::int64_t batch, heads, rows, columns;
};

// Why a grid of a block a tile, of 64 queries or keys, is too large; empty: it is not.
[[nodiscard]] std::string grid_refusal(const Problem& problem);

// Whether every row begins at a multiple of 16 bytes if the tensor does.
[[nodiscard]] bool has_aligned_rows(const Strides& strides) noexcept;

// Columns of a packed row: a multiple of 8.
[[nodiscard]] std::int64_t packed_columns(std::int64_t columns) noexcept;
// Elements of a packed tensor.
[[nodiscard]] std::int64_t packed_count(const Extent& extent) noexcept;
// packed[batch, heads, rows, packed_columns] = source, with zeros in the columns that were added.
void pack(const void* source, const Strides& strides, const Extent& extent, void* packed, void* stream);
[[nodiscard]] Strides packed_strides(const Extent& extent) noexcept;

// Whether cp.async takes the tensor as it is, by kernels that reckon in 32 bits within a tile.
[[nodiscard]] bool is_taken_by_rows(const Strides& strides, const Extent& extent) noexcept;

// A tensor as a kernel reads it: itself if `as_it_is`, else a packed copy.
struct Operand {
  const void* data = nullptr;  // once it was read
  Strides strides;             // of `data`
  Extent extent;
  void* copy = nullptr;

  Operand(const Strides& given, const Extent& size, bool as_it_is, Workspace& workspace);
  static Operand by_rows(const Strides& given, const Extent& size, Workspace& workspace) {
    return {given, size, is_taken_by_rows(given, size), workspace};
  }
  // Throws Error(invalid_argument) if it is read as it is and not aligned to 16 bytes.
  void read(const void* tensor, const char* name, void* stream);
};

// Keys of a row of K^T: a multiple of 64.
[[nodiscard]] std::int64_t column_stride(std::int64_t keys) noexcept;
// kt[batch, heads, columns + 1, column_stride(rows)] = K^T, with zeros for the keys and the row that were added.
void transpose(const void* k, const Strides& strides, const Extent& extent, void* kt, void* stream);

// fused[batch, heads_q, groups + 1, stride] = for every head the sums of the groups' rows of kt, in fp32, and a row of
// zeros: k_hat^T of a grouping that holds for the whole sequence. order: [batch, heads_q, 1, columns].
struct Fusion {
  DType dtype;
  std::int64_t batch, heads_q, heads_kv, columns, stride;
  std::int64_t groups, members;
};
void fuse(const void* kt, const std::int32_t* order, const Fusion& fusion, void* fused, void* stream);

}  // namespace distr::cuda
