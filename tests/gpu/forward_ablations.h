// SPDX-License-Identifier: Apache-2.0
// The stages of the forward kernels with one of them taken out, and how a kernel is run with shapes that are compiled
// of them in the place of its own.
#pragma once

#include <string>

#include "cuda/stages.cuh"
#include "gpu/ablations.h"

namespace distr::test {

// What is left computes no probabilities, so no row is computed again for what became of its own.
struct Ablation : cuda::Stages {
  static constexpr bool kRepeatsRows = false;
};

// P is the exponent.
struct NoExponential : Ablation {
  template <class Exp2>
  __device__ __forceinline__ static float exponential(float exponent, const Exp2& /*exp2*/) {
    return exponent;
  }
};

// No tile of k_hat is made of K; products read what is left in its place.
struct NoFusion : Ablation {
  template <class Step>
  __device__ __forceinline__ static void fusion(const Step& /*step*/) {}
};

// V is neither loaded nor multiplied.
struct NoValues : Ablation {
  template <class Step>
  __device__ __forceinline__ static void values(const Step& /*step*/) {}
};

// Shapes: kVariants; unsupported_reason(), why there is none for a problem that the kernel serves; and the kernel's own
// supports() and plan_forward_among().
template <class Shapes>
ForwardAblation ablation_of(ForwardKernel kernel, const char* stage) {
  kernel.supports = [](const Problem& problem, const Grouping& grouping) {
    const std::string reason = Shapes::supports(problem, grouping);
    return reason.empty() ? Shapes::unsupported_reason(problem, grouping) : reason;
  };
  kernel.plan = [](const Problem& problem, const Grouping& grouping, const Execution& execution) {
    return Shapes::plan_among(Shapes::kVariants, problem, grouping, execution);
  };
  return {stage, kernel};
}

}  // namespace distr::test
