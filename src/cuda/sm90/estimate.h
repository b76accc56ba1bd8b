// SPDX-License-Identifier: Apache-2.0
// q_hat of every block's grouping, and k_hat of one grouping for the whole sequence (method, 2: steps 4 and 5).
#pragma once

#include <cstdint>

#include "cuda/prepare.h"

namespace distr::cuda::sm90 {

enum class Estimate : std::uint8_t { sum, mean, first };  // of a group's columns

// estimated[batch, heads_q, rows, packed_columns(columns)] of x[batch, heads, rows, columns], where query head
// h reads head h / (heads_q / heads); sums in fp32; zeros in the columns that are added. order: [batch, heads_q,
// ceil(rows / block), columns], for blocks that 64 divides or that hold all rows.
struct Estimation {
  DType dtype;
  Estimate kind;
  std::int64_t heads_q;
  std::int64_t block;
  std::int64_t first_row;  // of a block; those before it are left as they are
  std::int64_t columns;    // of the estimates
  int members;             // of a group
  int copies;              // of a group's estimate, beside each other
  float scale = 1;         // of the estimates, before they are rounded
};
void estimate(const void* x, const Strides& strides, const Extent& extent, const std::int32_t* order,
              const Estimation& estimation, void* estimated, void* stream);
// The same, of an operand to an operand.
[[nodiscard]] Operand estimated(Operand x, const std::int32_t* order, const Estimation& estimation, void* to,
                                void* stream);

}  // namespace distr::cuda::sm90
