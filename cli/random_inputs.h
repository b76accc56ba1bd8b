// SPDX-License-Identifier: Apache-2.0
// Problems of a given size to be timed: standard normal values, and the work that exact attention has with them.
#pragma once

#include <cstdint>

#include "comparison.h"
#include "inputs.h"

namespace distr::cli {

[[nodiscard]] Inputs random_inputs(const Problem& problem, std::uint64_t seed);

// Floating-point operations of exact attention: two for each multiply-add of its products, over the pairs that see
// each other. 0 for grouping, which exact attention lacks.
[[nodiscard]] double exact_operations(const Problem& problem, Work work);

}  // namespace distr::cli
