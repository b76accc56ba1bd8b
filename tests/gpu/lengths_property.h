// SPDX-License-Identifier: Apache-2.0
// What kernels make of lengths that are data, beside the shared problems: of tiles that they fill or not, of many
// sequences, and of lengths that reach behind the tensors, for no host has looked at them (Lengths).
#pragma once

#include <string>

#include "kernel.h"

namespace distr::test {

// As Property::judge.
[[nodiscard]] std::string lengths_are_clamped(const ForwardKernel& kernel, DType dtype);
[[nodiscard]] std::string sequences_end_anywhere(const ForwardKernel& kernel, DType dtype);
[[nodiscard]] std::string sequences_end_anywhere(const BackwardKernel& kernel, DType dtype);

}  // namespace distr::test
