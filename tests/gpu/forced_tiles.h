// SPDX-License-Identifier: Apache-2.0
// Kernels with tiles that they take where there is so much to do (sm80/heuristics.h) that no check has the time for it
// on a GPU of many SMs.
#pragma once

#include <span>

#include "kernel.h"

namespace distr::test {

// sm80/forward with tiles of 128 queries wherever there are any.
[[nodiscard]] std::span<const ForwardKernel> forced_tiles();

// The backend's backward kernels, and sm80/backward_atomics once more with sums of dQ where it leaves a call to the
// kernels of sm80/backward.
[[nodiscard]] std::span<const BackwardKernel> backward_kernels();

}  // namespace distr::test
