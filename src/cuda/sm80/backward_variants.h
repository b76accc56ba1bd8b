// SPDX-License-Identifier: Apache-2.0
// The compiled backward kernels, for the host: what each takes, and how it is launched.
#pragma once

#include <span>

#include "cuda/sm80/backward_config.h"

namespace distr::cuda::sm80 {

// What a launch of one of its kernels is made of.
struct BackwardShape {
  int rows, keys;  // of a tile
  int parts;       // thread blocks that share a tile
  int threads, shared_bytes;
  int ctas_per_sm;
};

struct BackwardVariant {
  int dim;  // d and dv up to it
  bool masks, windows;
  BackwardShape of_keys, of_queries;                                   // dK and dV; dQ
  BackwardShape of_all, convert;                                       // all, with dQ in sums; dQ from these
  void (*launch)(const BackwardParameters& parameters, void* stream);  // dQ, and dK and dV
  void (*launch_sequences)(const BackwardParameters& parameters,
                           void* stream);  // of packed ones; null: none is compiled
  void (*launch_atomics)(const BackwardParameters& parameters,
                         void* stream);  // all at once; dQ from dq_accum. Null: none is compiled
};

// In order of preference.
std::span<const BackwardVariant> backward_variants_f16();
std::span<const BackwardVariant> backward_variants_bf16();

}  // namespace distr::cuda::sm80
