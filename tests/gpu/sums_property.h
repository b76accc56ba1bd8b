// SPDX-License-Identifier: Apache-2.0
// What is lost in sums over many keys, and over many rows of several heads.
#pragma once

#include <string>

#include "kernel.h"

namespace distr::test {

// As Property::judge.
[[nodiscard]] std::string long_sums_lose_little(const ForwardKernel& kernel, DType dtype);
[[nodiscard]] std::string long_sums_lose_little(const BackwardKernel& kernel, DType dtype);

}  // namespace distr::test
