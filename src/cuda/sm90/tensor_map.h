// SPDX-License-Identifier: Apache-2.0
// Tensors as TMA reads them.
#pragma once

#include <cuda.h>

#include "cuda/prepare/operand.h"

namespace distr::cuda::sm90 {

// A tensor as TMA reads it: itself, or a packed copy.
[[nodiscard]] Input for_tma(const char* name, const Strides& strides, const Extent& extent, WorkspaceLayout& workspace);

// What is copied at a time: columns up to 64, a panel of the tile (config.h, Panels).
struct Box {
  int rows, columns;
};
// Of 16-bit elements: [columns, rows, heads, batch].
[[nodiscard]] CUtensorMap tensor_map(const Operand& tensor, DType dtype, const Box& box);

}  // namespace distr::cuda::sm90
