// SPDX-License-Identifier: Apache-2.0
// Problems of a given size for timing: inputs with standard normal values, and the work of exact attention on them.
#pragma once

#include <cstdint>

#include "comparison.h"
#include "inputs.h"

namespace distr::cli {

// Throws InputError for a problem that is not valid, and Error(out_of_memory) for one whose tensors this machine cannot
// hold; both name the flags.
void validate_random(const Problem& problem);

[[nodiscard]] Inputs random_inputs(const Problem& problem, std::uint64_t seed);

// The floating-point operations of exact attention: two for each multiply-add of its products, over the pairs of a
// query and a key that it sees. 0 for grouping, which exact attention does not have.
[[nodiscard]] double exact_operations(const Problem& problem, Work work);

}  // namespace distr::cli
