// SPDX-License-Identifier: Apache-2.0
// The blocks of Q and the groups of columns that each of them uses (method, 2).
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/element.h"
#include "common/grouping.h"
#include "common/mask.h"
#include "distr/grouping.h"

namespace distr::common {

// r groups of columns: group g is the columns order[g * members] .. order[g * members + size(g) - 1].
struct Groups {
  const std::int32_t* order = nullptr;  // [columns]; null: 0, 1, 2, ...
  std::int64_t columns = 0;             // d
  std::int64_t count = 0;               // r
  std::int64_t members = 1;             // G for lsh; 1 for exact and for energy, which drops the other columns

  [[nodiscard]] std::int64_t size(std::int64_t g) const noexcept { return std::min(members, columns - g * members); }
  [[nodiscard]] std::int64_t column(std::int64_t g, std::int64_t member) const noexcept {
    const std::int64_t position = g * members + member;
    return order == nullptr ? position : order[position];
  }
};

[[nodiscard]] inline std::int64_t num_blocks(const Problem& problem, const Grouping& grouping) noexcept {
  return ceil_div(problem.seq_q, grouping.block);
}

// Block 0 of `previous` has no block before it to compute its order from and is exact, as all blocks are at G = 1.
[[nodiscard]] inline bool is_exact_block(const Grouping& grouping, std::int64_t block) noexcept {
  const bool computed = traits(grouping.strategy).order == OrderSource::computed;
  const bool is_first = block == 0 && (!grouping.part.has_value() || grouping.part->first_row == 0);
  return is_exact(grouping) || (computed && grouping.order_from == OrderFrom::previous && is_first);
}

// How many rows attend exactly. They are the first rows.
[[nodiscard]] inline std::int64_t count_exact_rows(const Problem& problem, const Grouping& grouping) noexcept {
  return is_exact(grouping) ? problem.seq_q : is_exact_block(grouping, 0) ? std::min(grouping.block, problem.seq_q) : 0;
}

// Columns of a group, but for a shorter last one.
[[nodiscard]] inline std::int64_t members_of(const Grouping& grouping) noexcept {
  switch (traits(grouping.strategy).members) {
    case Members::one:
      break;
    case Members::group_size:
      return grouping.group_size;
  }
  return 1;
}

[[nodiscard]] inline Groups block_groups(const Problem& problem, const Grouping& grouping, const std::int32_t* order,
                                         std::int64_t b, std::int64_t h, std::int64_t block) noexcept {
  const std::int64_t d = problem.head_dim;
  if (is_exact_block(grouping, block)) {
    return {nullptr, d, d, 1};
  }
  const std::int64_t row = (b * problem.heads_q + h) * num_blocks(problem, grouping) + block;
  return {order + row * d, d, num_groups(problem, grouping), members_of(grouping)};
}

// The block of Q whose rows decide the order of `block`.
[[nodiscard]] inline std::int64_t order_block(const Grouping& grouping, std::int64_t block) noexcept {
  return grouping.order_from == OrderFrom::previous ? block - 1 : block;
}

[[nodiscard]] inline std::int64_t block_rows(const Problem& problem, const Grouping& grouping,
                                             std::int64_t block) noexcept {
  return std::min(grouping.block, problem.seq_q - block * grouping.block);
}

// The keys 0 .. order_keys - 1, together with those rows, decide the energies of `block`.
[[nodiscard]] inline std::int64_t order_keys(const Problem& problem, const Grouping& grouping,
                                             std::int64_t block) noexcept {
  if (grouping.order_from == OrderFrom::own) {
    return problem.seq_k;
  }
  return std::clamp<std::int64_t>(block * grouping.block + causal_offset(problem), 0, problem.seq_k);
}

}  // namespace distr::common
