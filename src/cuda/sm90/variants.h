// SPDX-License-Identifier: Apache-2.0
// The compiled kernels, for the host: what each takes, and how it is launched.
#pragma once

#include <span>

#include "cuda/sm90/config.h"

namespace distr::cuda::sm90 {

struct Variant {
  DType dtype;
  ScaleIn scale_in;
  int columns;             // of q_hat and k_hat
  int near_columns;        // of q and K, where near keys come first; else as many
  int values, rows, keys;  // Config's, as all that follow
  KeyLoad load;
  int ctas_per_sm;
  bool caps_scores, takes_windows, takes_lengths;
  int threads, shared_bytes;
  void (*launch)(const ForwardParameters& parameters, void* stream);
};

std::span<const Variant> variants();
// Of these those that take some of the keys.
[[nodiscard]] std::span<const Variant> listed_variants();

}  // namespace distr::cuda::sm90
