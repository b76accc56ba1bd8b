// SPDX-License-Identifier: Apache-2.0
// Which tiles a plan names and takes.
#pragma once

#include <string>

#include "kernel.h"

namespace distr::test {

// As Property::judge. A kernel takes tiles of as many rows as it names, and where it is asked for others answers with
// those that it has, all of them, so that the error can name them (Plan).
[[nodiscard]] std::string names_its_tiles(const ForwardKernel& kernel, DType dtype);

}  // namespace distr::test
