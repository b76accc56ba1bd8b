// SPDX-License-Identifier: Apache-2.0
// How a forward kernel is run with its twins in the place of its own shapes.
#pragma once

#include <string>

#include "gpu/twins.h"

namespace distr::test {

// Twins: kVariants, the shapes; refusal(), why there is no twin for a problem; and the kernel's own supports() and
// plan_forward_among().
template <class Twins>
ForwardTwin twin_of(ForwardKernel kernel, const char* without) {
  kernel.supports = [](const Problem& problem, const Grouping& grouping) {
    const std::string reason = Twins::supports(problem, grouping);
    return reason.empty() ? Twins::refusal(problem, grouping) : reason;
  };
  kernel.plan = [](const Problem& problem, const Grouping& grouping, const Execution& execution) {
    return Twins::plan_among(Twins::kVariants, problem, grouping, execution);
  };
  return {without, kernel};
}

}  // namespace distr::test
