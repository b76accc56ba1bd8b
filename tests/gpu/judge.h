// SPDX-License-Identifier: Apache-2.0
// What is wrong with a kernel on an instance, by the rules of support/oracle.h; "": nothing. Each throws what
// run_on_device() does.
#pragma once

#include <string>

#include "kernel.h"
#include "support/lengths.h"

namespace distr::test {

std::string judge(const GroupingKernel& kernel, Instance instance);
std::string judge(const ForwardKernel& kernel, Instance instance);
std::string judge(const BackwardKernel& kernel, Instance instance);
// From O and LSE of the plain forward. Tensor cores leave out rows with a huge LSE (include/distr/attention.h): their
// gradients are finite.
std::string judge_own(const BackwardKernel& kernel, Instance instance);
// Of values near the largest.
std::string judge_large_values(const ForwardKernel& kernel, Instance instance);
// With lengths that are data. A backward has packed sequences alone.
std::string judge_with_lengths(const ForwardKernel& kernel, LengthsAs kind, Instance instance);
std::string judge_with_lengths(const BackwardKernel& kernel, LengthsAs kind, Instance instance);

}  // namespace distr::test
