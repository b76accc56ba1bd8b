// SPDX-License-Identifier: Apache-2.0
// The arrays that kernels declare as `extern __shared__`. An array in another namespace or of another name needs a line
// in dynamic_arrays.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace distr::emulator {

inline constexpr std::size_t kMaxSharedBytes = std::size_t{230} * 1024;

struct DynamicArray {
  std::span<std::byte> bytes;
  std::uint32_t alignment;  // of its address, as declared; 16 where none is declared
};

// The arrays of the calling system thread.
[[nodiscard]] std::vector<DynamicArray> dynamic_arrays();

}  // namespace distr::emulator
