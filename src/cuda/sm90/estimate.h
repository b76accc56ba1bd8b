// SPDX-License-Identifier: Apache-2.0
// q_hat of every block's grouping, as it is or spread over the d columns, and k_hat of one grouping for the whole
// sequence (method, 2: steps 4 and 5; 3: Q~).
#pragma once

#include <cstdint>
#include <span>

#include "cuda/prepare.h"

namespace distr::cuda::sm90 {

enum class Estimate : std::uint8_t { sum, mean, first };  // of a group's columns

// What estimations that are made together, one or two, have in common.
struct Groups {
  DType dtype;
  const std::int32_t* order;
  std::int64_t heads_q;
  int members;  // of a group
  int count;
};

// estimated[batch, heads_q, rows, packed_columns(columns)] of x[batch, heads, rows, columns of x], where query head
// h reads head h / (heads_q / heads); sums in fp32; zeros in the columns that are added. order: [batch, heads_q,
// ceil(rows / block), columns of x], for blocks that 64 divides or that hold all rows.
struct Estimation {
  Operand x;
  Estimate kind;
  std::int64_t block;
  std::int64_t first_row;  // of a block; those before it are left as they are
  bool spread;             // over x's columns: each holds its group's estimate, those without a group 0; else one
                           // column for each group
  float scale;             // of the estimates, before they are rounded
  void* estimated;

  [[nodiscard]] std::int64_t columns(const Groups& groups) const { return spread ? x.extent.columns : groups.count; }
  // The estimates as an operand.
  [[nodiscard]] Operand result(const Groups& groups) const;
};

void estimate(const Groups& groups, std::span<const Estimation> estimations, void* stream);

}  // namespace distr::cuda::sm90
