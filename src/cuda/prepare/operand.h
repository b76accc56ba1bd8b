// SPDX-License-Identifier: Apache-2.0
// Tensors as tensor-core kernels read them: of 16-bit elements, in rows that begin at multiples of 16 bytes.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/workspace.h"
#include "distr/problem.h"

namespace distr::cuda {

// Sizes of a tensor [batch, heads, rows, columns].
struct Extent {
  std::int64_t batch, heads, rows, columns;
};

// Why a grid of a block a tile, of 64 queries or keys, is too large; empty: it is not.
[[nodiscard]] std::string unsupported_grid_reason(const Problem& problem);

// Whether every row begins at a multiple of 16 bytes if the tensor does.
[[nodiscard]] bool has_aligned_rows(const Strides& strides) noexcept;

// Columns of a packed row: a multiple of 8.
[[nodiscard]] std::int64_t packed_columns(std::int64_t columns) noexcept;
// Elements of a packed tensor.
[[nodiscard]] std::int64_t packed_count(const Extent& extent) noexcept;
[[nodiscard]] Strides packed_strides(const Extent& extent) noexcept;

// Whether cp.async takes the tensor as it is, by kernels that reckon in 32 bits within a tile.
[[nodiscard]] bool suits_cp_async(const Strides& strides, const Extent& extent) noexcept;

// A tensor as a kernel reads it.
struct Operand {
  const void* data = nullptr;
  Strides strides{};
  Extent extent{};
  bool ends_by_entry = false;  // TMA reads batch entries that end by themselves
};
// A packed one.
[[nodiscard]] inline Operand packed(const void* data, const Extent& extent) noexcept {
  return {data, packed_strides(extent), extent};
}

// How one of the caller's tensors becomes an operand: it is one, or a packed copy of it is made in the workspace, with
// zeros in the columns that are added.
class Input {
 public:
  Input() = default;
  // name: of the tensor, and of the workspace's part.
  Input(const char* name, const Strides& strides, const Extent& extent, bool as_it_is, WorkspaceLayout& workspace);
  static Input for_cp_async(const char* name, const Strides& strides, const Extent& extent,
                            WorkspaceLayout& workspace) {
    return {name, strides, extent, suits_cp_async(strides, extent), workspace};
  }

  [[nodiscard]] const Extent& extent() const noexcept { return extent_; }
  // Of the operand.
  [[nodiscard]] Strides strides() const noexcept { return copy_.exists() ? packed_strides(extent_) : strides_; }
  // Puts the copying on the stream. Throws Error(invalid_argument) if the tensor is read as it is and not aligned to 16
  // bytes.
  [[nodiscard]] Operand read(const void* tensor, void* workspace, void* stream) const;

 private:
  const char* name_ = nullptr;
  Strides strides_{};  // the caller's
  Extent extent_{};
  Part<std::uint16_t> copy_;
};

}  // namespace distr::cuda
