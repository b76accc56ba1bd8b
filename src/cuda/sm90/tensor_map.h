// SPDX-License-Identifier: Apache-2.0
// Tensors as TMA reads them.
#pragma once

#include <cuda.h>

#include "cuda/prepare/operand.h"

namespace distr::cuda::sm90 {

// A tensor as TMA reads it: itself, or a packed copy.
[[nodiscard]] Input for_tma(const char* name, const Strides& strides, const Extent& extent, WorkspaceLayout& workspace);

// The same where lengths are data: a batch entry begins whole rows behind the one before it.
[[nodiscard]] Input entries_for_tma(const char* name, const Strides& strides, const Extent& extent,
                                    WorkspaceLayout& workspace);
// Rows from an entry to the next; 0 of a batch of one, as packed sequences are.
[[nodiscard]] std::int64_t entry_rows(const Extent& extent, const Strides& strides) noexcept;
// Such a tensor, whose map has five axes (config.h, kEntryRows).
[[nodiscard]] Operand of_entries(Operand tensor);

// What is copied at a time: columns up to 64, a panel of the tile (config.h, Panels).
struct Box {
  int rows, columns;
};
// Of 16-bit elements: [columns, rows, heads, batch], or that of entries.
[[nodiscard]] CUtensorMap tensor_map(const Operand& tensor, DType dtype, const Box& box);

}  // namespace distr::cuda::sm90
