// SPDX-License-Identifier: Apache-2.0
// How a forward kernel is run with its twins in the place of its own shapes.
#pragma once

#include <string>

#include "cuda/other_variants.h"
#include "gpu/twins.h"

namespace distr::test {

// Twins: kVariants, the shapes; refusal(), why there is no twin for a problem; and the kernel's own supports(),
// workspace_bytes() and run().
template <class Twins>
ForwardTwin twin_of(ForwardKernel kernel, const char* without) {
  using Others = cuda::OtherVariants<typename decltype(Twins::kVariants)::value_type>;
  kernel.supports = [](const Problem& problem, const Grouping& grouping) {
    const std::string reason = Twins::refusal(problem, grouping);
    const Others twins(Twins::kVariants);
    return reason.empty() ? Twins::supports(problem, grouping) : reason;
  };
  kernel.workspace_bytes = [](const Problem& problem, const Grouping& grouping, int threads) {
    const Others twins(Twins::kVariants);
    return Twins::workspace_bytes(problem, grouping, threads);
  };
  kernel.run = [](const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                  const Execution& execution) {
    const Others twins(Twins::kVariants);
    Twins::run(problem, grouping, tensors, execution);
  };
  return {without, kernel};
}

}  // namespace distr::test
