// SPDX-License-Identifier: Apache-2.0
// Which devices a build's kernels run on. Compute capabilities are numbers such as 90 for 9.0.
#pragma once

#include <algorithm>
#include <initializer_list>

namespace distr::cuda {

// Machine code runs on devices of the same major version whose minor version is not less; PTX on every later device.
constexpr bool runs_on(int capability, std::initializer_list<int> machine_code, std::initializer_list<int> ptx) {
  return std::any_of(machine_code.begin(), machine_code.end(),
                     [=](int code) { return code / 10 == capability / 10 && code <= capability; }) ||
         std::any_of(ptx.begin(), ptx.end(), [=](int code) { return code <= capability; });
}

}  // namespace distr::cuda
