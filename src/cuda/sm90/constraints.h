// SPDX-License-Identifier: Apache-2.0
// What no kernel for sm_90a takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "common/near.h"
#include "cuda/launch.h"
#include "cuda/prepare/operand.h"
#include "kernel.h"

namespace distr::cuda::sm90 {

// Of lengths that are data: rows that the ends of batch entries are counted in.
[[nodiscard]] inline std::int64_t count_entry_rows(const Problem& problem) {
  if (problem.packed.has_value()) {
    return std::max(problem.packed->total_q, problem.packed->total_k);
  }
  const auto rows = [&](const Strides& strides) {
    const std::int64_t between = strides.row > 0 ? strides.batch / strides.row : 0;
    return problem.batch * std::max(between, problem.heads_kv * problem.seq_k);
  };
  return problem.key_lengths ? std::max(rows(problem.k), rows(problem.v)) : 0;
}

// Why the problem is not taken; empty: it is.
[[nodiscard]] inline std::string unsupported_reason(const Problem& problem, const Grouping& grouping) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16";
  }
  if (std::max(problem.head_dim, problem.head_dim_v) > 128) {
    return "takes head_dim and head_dim_v up to 128";
  }
  if (problem.mask.kind != MaskKind::none) {
    return "takes no mask tensor";
  }
  if (!(problem.softmax_scale() > 0)) {
    return "takes scales above 0";
  }
  if (problem.seq_k == 0 || (problem.packed.has_value() && problem.packed->total_k == 0)) {
    return "takes at least one key";
  }
  if (std::max(problem.seq_q, problem.seq_k) > std::numeric_limits<std::int32_t>::max() / 512) {
    return "takes sequences up to 4194303";
  }
  if (count_entry_rows(problem) > std::numeric_limits<std::int32_t>::max() / 2) {
    return "takes lengths that are data of tensors up to 1073741823 rows, of all heads where batch entries have their "
           "own";
  }
  if (problem.softcap != 0 && (common::count_exact_rows(problem, grouping) < problem.seq_q || grouping.skip > 0)) {
    return "caps scores in exact attention alone";
  }
  return unsupported_grid_reason(problem);
}

// A thread block of 128 queries has one set of near keys, and one of 192 two at most.
[[nodiscard]] inline std::string near_keys_reason(const Problem& problem, const Grouping& grouping) {
  constexpr std::int64_t kRows = 128;
  if (!common::has_near_keys(grouping)) {
    return "";
  }
  return common::near_rows(problem, grouping) % kRows != 0 ? "takes near keys of blocks of a multiple of 128 rows" : "";
}

// Why the current device does not serve; empty: it does, or no kernel of this build can run, which is said elsewhere.
[[nodiscard]] inline std::string unsupported_device_reason() {
  return unusable_reason().empty() && device_properties().major != 9 ? "needs compute capability 9.0" : "";
}

}  // namespace distr::cuda::sm90
