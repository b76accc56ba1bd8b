// SPDX-License-Identifier: Apache-2.0
// The compiled backward kernels, for the host: what each takes, and how it is launched.
#pragma once

#include <span>

#include "cuda/sm90/backward_config.h"

namespace distr::cuda::sm90 {

struct BackwardVariant {
  DType dtype;
  int columns, values, threads, shared_bytes;  // BackwardConfig's
  void (*launch)(const BackwardParameters& parameters, void* stream);
};

// Those of a type from the narrowest to the widest.
std::span<const BackwardVariant> backward_variants();

}  // namespace distr::cuda::sm90
