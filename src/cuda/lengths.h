// SPDX-License-Identifier: Apache-2.0
// Lengths that are data, as kernels are launched with them (sequence.cuh says what a thread block makes of them).
#pragma once

#include <cstdint>

#include "cuda/problem.h"
#include "distr/attention.h"

namespace distr::cuda {

struct DeviceLengths {
  bool packed = false;
  bool at_bottom_right = false;  // causality and a window count from an entry's own lengths
  std::int32_t total_q = 0, total_k = 0;
  Lengths of{};

  [[nodiscard]] __host__ __device__ bool exist() const { return packed || of.keys != nullptr; }

  DeviceLengths() = default;
  explicit DeviceLengths(const Problem& problem)
      : packed(problem.packed.has_value()), at_bottom_right(problem.causal != Causal::top_left) {
    if (packed) {
      total_q = static_cast<std::int32_t>(problem.packed->total_q);
      total_k = static_cast<std::int32_t>(problem.packed->total_k);
    }
  }
};

}  // namespace distr::cuda
