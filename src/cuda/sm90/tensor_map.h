// SPDX-License-Identifier: Apache-2.0
// What the host does alike for Hopper's kernels: tensors that the copy engine reads, and what is exact.
#pragma once

#include <cuda.h>

#include "cuda/prepare.h"
#include "distr/grouping.h"

namespace distr::cuda::sm90 {

// By strategy, or because the only block of `previous` is exact.
[[nodiscard]] bool is_exact_here(const Problem& problem, const Grouping& grouping) noexcept;

// A tensor as the copy engine reads it: itself, or a packed copy.
[[nodiscard]] Operand copied(const Strides& strides, const Extent& extent, Workspace& workspace);

// What is copied at a time: columns up to 64, a panel of the tile (config.h, Panels).
struct Box {
  int rows, columns;
};
// Of 16-bit elements: [columns, rows, heads, batch].
[[nodiscard]] CUtensorMap tensor_map(const Operand& tensor, DType dtype, const Box& box);

}  // namespace distr::cuda::sm90
