// SPDX-License-Identifier: Apache-2.0
// What must hold of every kernel beside its numbers on the shared problems.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernel.h"
#include "support/cases.h"

namespace distr::test {

// Values at the ends of the number range, judged by O alone: the truth's LSE there is a matter of units.
struct Extreme {
  std::string name;
  Instance instance;
};
[[nodiscard]] std::vector<Extreme> extremes(DType dtype);
[[nodiscard]] std::string check_extreme(const ForwardKernel& kernel, Instance instance);

// Whether a kernel asks for finite values in V (include/distr/problem.h).
[[nodiscard]] bool needs_finite_values(const std::string& kernel);

// Whether a kernel that is not asked for LSE rounds q_hat times the scale: sm90/forward* in bf16, and sm80/forward
// where it has no row max then.
[[nodiscard]] bool rounds_the_scale(const std::string& kernel, const Case& test_case);

// A value that is not finite in Q, K or V: it goes where exact attention takes it, and nowhere else.
[[nodiscard]] std::vector<Instance> with_non_finite(const Case& test_case);

// Whether a backward kernel that asks for finite values must take this one as exact attention does: everything is seen,
// and each score reads it.
[[nodiscard]] bool reaches_everything(const Instance& instance);

inline constexpr const char* kNotAsked = "serves none of the problems";

template <class Kernel>
struct Property {
  const char* name;
  // Why the kernel lacks it; empty: it has it. kNotAsked: it serves none of the property's problems.
  std::function<std::string(const Kernel&, DType)> judge;
};
[[nodiscard]] std::vector<Property<GroupingKernel>> grouping_properties();
[[nodiscard]] std::vector<Property<ForwardKernel>> properties();
[[nodiscard]] std::vector<Property<BackwardKernel>> backward_properties();

// What the public functions refuse on this device, and with which words. Empty: all is well.
[[nodiscard]] std::string check_unsupported();

}  // namespace distr::test
