// SPDX-License-Identifier: Apache-2.0
// Kernels that are broken on purpose, to show that the check can fail.
#pragma once

#include <vector>

#include "kernel.h"

namespace distr::test {

template <class Kernel>
struct BrokenKernel {
  const char* what;
  const char* case_name;  // of tests/cases.json: where it must be noticed
  Kernel kernel;
};

// `kernel`, broken in one way each. They are valid until the calling thread's next call of the same function.
[[nodiscard]] std::vector<BrokenKernel<GroupingKernel>> broken_kernels(const GroupingKernel& kernel);
[[nodiscard]] std::vector<BrokenKernel<ForwardKernel>> broken_kernels(const ForwardKernel& kernel);
[[nodiscard]] std::vector<BrokenKernel<BackwardKernel>> broken_kernels(const BackwardKernel& kernel);

}  // namespace distr::test
