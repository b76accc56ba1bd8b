// SPDX-License-Identifier: Apache-2.0
// Kernels that do nothing but read: timed beside the real ones, so that a miss can be placed. Their results are wrong;
// they are part of this program alone.
#pragma once

#include <optional>

#include "kernel.h"

namespace distr::test {

// The twin of a grouping kernel that only reads its inputs, with the same grid.
[[nodiscard]] std::optional<GroupingKernel> reading_twin(const GroupingKernel& kernel);

}  // namespace distr::test
