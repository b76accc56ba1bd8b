// SPDX-License-Identifier: Apache-2.0
// merge() of tensors in CUDA memory. Empty: all is well.
#pragma once

#include <string>

#include "distr/problem.h"

namespace distr::test {

// Against merge() on the CPU in fp64: parts of other types and strides, rows that one part or none saw, weights that
// underflow, more parts than a launch takes, O and LSE that are those of a part; twice, with the same bits.
[[nodiscard]] std::string check_merge(DType dtype);

}  // namespace distr::test
