// SPDX-License-Identifier: Apache-2.0
// K^T: columns of K as rows, for kernels that take some of them.
#pragma once

#include "cuda/prepare/operand.h"

namespace distr::cuda {

// Keys of a row of K^T: a multiple of 64.
[[nodiscard]] std::int64_t transposed_stride(std::int64_t keys) noexcept;
// Elements of K^T.
[[nodiscard]] std::int64_t transposed_count(const Extent& k) noexcept;
// kt[batch, heads, columns + 1, transposed_stride(rows)] = K^T, with zeros for the keys and the row that were added.
void transpose(const Operand& k, void* kt, void* stream);

}  // namespace distr::cuda
