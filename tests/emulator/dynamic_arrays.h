// SPDX-License-Identifier: Apache-2.0
// The arrays that kernels declare as `extern __shared__`: a kernel of another namespace or with another name for it
// needs a line in dynamic_arrays.cpp.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace distr::emulator {

inline constexpr std::size_t kMostSharedBytes = std::size_t{230} * 1024;

// Of the calling thread of the system.
[[nodiscard]] std::vector<std::span<std::byte>> dynamic_arrays();

}  // namespace distr::emulator
