// SPDX-License-Identifier: Apache-2.0
// What kernels make of lengths that reach behind the tensors: no host has looked at them (Lengths).
#pragma once

#include <string>

#include "kernel.h"

namespace distr::test {

// As Property::judge.
[[nodiscard]] std::string lengths_are_clamped(const ForwardKernel& kernel, DType dtype);

}  // namespace distr::test
