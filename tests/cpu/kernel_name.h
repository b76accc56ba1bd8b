// SPDX-License-Identifier: Apache-2.0
// The kernel that a call on the CPU should take.
#pragma once

#include <string>

#include "cpu/entries.h"

namespace distr::test {

// For forward and backward.
inline std::string cpu_kernel(Operation operation, DType dtype) {
  const std::string name = operation == Operation::forward ? "cpu/forward" : "cpu/backward";
  return dtype == DType::bf16 && cpu::products_of_bf16() != cpu::Products::of_floats ? name + "_bf16" : name;
}

}  // namespace distr::test
