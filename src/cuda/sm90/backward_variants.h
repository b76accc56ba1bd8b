// SPDX-License-Identifier: Apache-2.0
// The compiled backward kernels, for the host: what each takes, and how it is launched.
#pragma once

#include <span>

#include "cuda/sm90/backward_config.h"
#include "kernel.h"

namespace distr::cuda::sm90 {

struct BackwardVariant {
  DType dtype;
  int columns, values;  // BackwardConfig's, as all that follow
  bool caps_scores, takes_lengths;
  int threads, shared_bytes;
  void (*launch)(const BackwardParameters& parameters, void* stream);
  void (*add_pieces)(const BackwardParameters& parameters, void* stream);  // behind it, of split blocks

  [[nodiscard]] LaunchShape shape(std::int64_t thread_blocks) const {
    return {{kQueryTileRows, kKeyTileRows, values, columns}, thread_blocks, threads, shared_bytes};
  }
};

// Those of a type from the narrowest to the widest.
std::span<const BackwardVariant> backward_variants();

}  // namespace distr::cuda::sm90
