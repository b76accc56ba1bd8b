// SPDX-License-Identifier: Apache-2.0
// The emulated device is one of compute capability 9.0, whatever the build's kernels are for.
#pragma once

#include <initializer_list>

namespace distr::cuda {

inline constexpr std::initializer_list<int> kMachineCode = {90};
inline constexpr std::initializer_list<int> kPtx = {};

}  // namespace distr::cuda
