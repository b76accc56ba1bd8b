// SPDX-License-Identifier: Apache-2.0
// The gradient of an additive mask, for every backward: by a plain kernel, in fp32 (plain/mask_gradient.cu).
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "cuda/problem.h"
#include "kernel.h"

namespace distr::cuda {

class MaskGradient {
 public:
  MaskGradient(const Problem& problem, const Grouping& grouping);

  // Why its grid would be too large; empty: it is not.
  [[nodiscard]] static std::string unsupported_reason(const Problem& problem, const Grouping& grouping);

  // Puts the kernel that writes `tensors.d_mask` on the stream, behind those that made delta [B, Hq, Nq], D of every
  // row (method, 3).
  void write(const BackwardTensors& tensors, float* delta, void* stream) const;

 private:
  DType dtype_;
  float scale_;
  DeviceProblem problem_;
  std::array<std::int64_t, 4> shape_;  // 1 along the axes that repeat
};

}  // namespace distr::cuda
