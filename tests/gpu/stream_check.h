// SPDX-License-Identifier: Apache-2.0
// StreamedAttention on CUDA devices. Empty: all is well.
#pragma once

#include <string>

#include "distr/problem.h"

namespace distr::test {

// 12 heads in chunks of at most 5, with one thread on the device and with two: the bits of one call, for every
// strategy, near keys and strides, from memory that is pinned and that is not; and the words of a device that is not
// there.
[[nodiscard]] std::string check_streaming(DType dtype);

}  // namespace distr::test
