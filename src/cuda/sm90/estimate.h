// SPDX-License-Identifier: Apache-2.0
// q_hat of every block's grouping, as it is or spread over the d columns, and k_hat of one grouping for the whole
// sequence (method, 2: steps 4 and 5; 3: Q~).
#pragma once

#include <cstdint>
#include <span>

#include "cuda/prepare.h"

namespace distr::cuda::sm90 {

enum class Estimate : std::uint8_t { sum, mean, first };  // of a group's columns

// estimated[batch, heads_q, rows, packed_columns(columns)] of x[batch, heads, rows, columns], where query head
// h reads head h / (heads_q / heads); sums in fp32; zeros in the columns that are added. order: [batch, heads_q,
// ceil(rows / block), columns], for blocks that 64 divides or that hold all rows.
struct Estimation {
  Operand x;
  Estimate kind;
  std::int64_t block;
  std::int64_t first_row;  // of a block; those before it are left as they are
  std::int64_t columns;    // of the estimates: one for each group, or, if they are spread, x's
  bool spread;             // each column of a group holds the group's estimate; every column has a group
  float scale;             // of the estimates, before they are rounded
  void* estimated;

  // The estimates as an operand.
  [[nodiscard]] Operand result(std::int64_t heads_q) const;
};

// What estimations that are made together, one or two, have in common.
struct Groups {
  DType dtype;
  const std::int32_t* order;
  std::int64_t heads_q;
  int members;  // of a group
};

void estimate(const Groups& groups, std::span<const Estimation> estimations, void* stream);

}  // namespace distr::cuda::sm90
