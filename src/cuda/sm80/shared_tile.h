// SPDX-License-Identifier: Apache-2.0
// A tile's place in shared memory.
#pragma once

#include <cstdint>

namespace distr::cuda::sm80 {

// A swizzled tile [kRows][kColumns] of 16-bit elements. It begins at a multiple of 1024, as tiles come first in the
// storage and each is a multiple of that.
template <int kRows, int kColumns>
struct SharedTile {
  alignas(16) std::uint8_t bytes[kRows * kColumns * 2];
  static_assert(sizeof(bytes) % 1024 == 0);
};

}  // namespace distr::cuda::sm80
