// SPDX-License-Identifier: Apache-2.0
// What must hold of the public functions on a GPU beside their results. Empty strings: all is well.
#pragma once

#include <string>

#include "distr/problem.h"

namespace distr::test {

// All three operations do everything on the stream they are given: nothing happens before the stream's earlier work is
// done, the call does not wait for it, and the results are those of any other run.
[[nodiscard]] std::string check_streams(DType dtype);

// include/distr/device.h: copies, times, and the words of memory that cannot be had.
[[nodiscard]] std::string check_memory();

}  // namespace distr::test
