// SPDX-License-Identifier: Apache-2.0
// Tensors whose rows are as far apart as a kernel may take them where they are.
#pragma once

#include <string>

#include "kernel.h"

namespace distr::test {

// Q, K and V in rows of 2^24 - 8 elements, the most that tensor-core kernels read in place, and of 2^24, which they
// copy first, give what they give in contiguous rows. Empty: they do; kNotAsked: the kernel serves no such problem.
[[nodiscard]] std::string check_large_strides(const ForwardKernel& kernel, DType dtype);

}  // namespace distr::test
