// SPDX-License-Identifier: Apache-2.0
// sm80/forward with tiles of 128 queries wherever there are any. Left to itself it takes them where there is so much to
// do (sm80/heuristics.h) that no check has the time for it on a GPU of many SMs.
#pragma once

#include <span>

#include "kernel.h"

namespace distr::test {

[[nodiscard]] std::span<const ForwardKernel> forced_tiles();

}  // namespace distr::test
