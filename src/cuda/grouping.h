// SPDX-License-Identifier: Apache-2.0
// The orders of the columns on a GPU (method, 2), three entries: `identity` where attention is exact, `lsh`, `energy`;
// and a fourth for the means over the keys alone, where the caller brings the order (method, 8).
// They read f16, bf16 and f32 with any strides, and any l; the sums are in fp32 in an order that depends on the problem
// alone, so the bits of an order are the same in every run.
#pragma once

#include <string>

#include "kernel.h"

namespace distr::cuda {

namespace identity {

[[nodiscard]] std::string supports(const Problem& problem, const Grouping& grouping);
// order[row, c] = c.
[[nodiscard]] KernelPlan<GroupingTensors> plan(const Problem& problem, const Grouping& grouping,
                                               const Execution& execution);

}  // namespace identity

namespace lsh {

// Refuses f64, and more blocks than a grid has.
[[nodiscard]] std::string supports(const Problem& problem, const Grouping& grouping);
// Workspace: none for l <= 256; above, the partial sums of at most 64 pieces of a block: 64 * 16 * (d rounded up to 64)
// floats.
[[nodiscard]] KernelPlan<GroupingTensors> plan(const Problem& problem, const Grouping& grouping,
                                               const Execution& execution);

}  // namespace lsh

namespace energy {

// Refuses f64, and more blocks than a grid has.
[[nodiscard]] std::string supports(const Problem& problem, const Grouping& grouping);
// The same of plan() for the means alone: `given` with near keys.
[[nodiscard]] std::string supports_means(const Problem& problem, const Grouping& grouping);
// Workspace, with w = d up to a multiple of 32: w floats for every piece of a block of Q (one piece where l <= 256, at
// most 64 above), and 2 w floats for every run of keys, at most 64 a KV head; with `previous` as many for every l keys
// (or fewer) if a run has more.
[[nodiscard]] KernelPlan<GroupingTensors> plan(const Problem& problem, const Grouping& grouping,
                                               const Execution& execution);

}  // namespace energy

}  // namespace distr::cuda
