// SPDX-License-Identifier: Apache-2.0
// Questions about a grouping that need no problem.
#pragma once

#include "distr/grouping.h"

namespace distr {

// Exact attention: by strategy, or because every column is a group of its own.
[[nodiscard]] inline bool is_exact(const Grouping& grouping) noexcept {
  return grouping.strategy == Strategy::exact || grouping.group_size == 1;
}

}  // namespace distr
