// SPDX-License-Identifier: Apache-2.0
// The compiled backward kernels, for the host: what each takes, and how it is launched.
#pragma once

#include <span>

#include "cuda/sm80/backward_config.h"

namespace distr::cuda::sm80 {

struct BackwardVariant {
  int dim;  // d and dv up to it
  bool masks;
  void (*launch)(const BackwardParameters& parameters, void* stream);          // dK and dV, then dQ
  void (*launch_atomics)(const BackwardParameters& parameters, void* stream);  // all at once, dQ from `sums`; or launch
};

// In order of preference.
std::span<const BackwardVariant> backward_variants_f16();
std::span<const BackwardVariant> backward_variants_bf16();

}  // namespace distr::cuda::sm80
