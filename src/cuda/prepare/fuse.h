// SPDX-License-Identifier: Apache-2.0
// k_hat^T of one grouping for the whole sequence (method, 2: step 5).
#pragma once

#include <cstdint>

#include "distr/problem.h"

namespace distr::cuda {

// fused[batch, heads_q, groups + 1, stride] = for every head the sums of the groups' rows of K^T (transpose.h), in
// fp32, and a row of zeros. order: [batch, heads_q, 1, columns].
struct Fusion {
  DType dtype;
  std::int64_t batch, heads_q, heads_kv, columns, stride;
  std::int64_t groups, members;

  [[nodiscard]] std::int64_t count() const noexcept { return batch * heads_q * (groups + 1) * stride; }
};
void fuse(const void* kt, const std::int32_t* order, const Fusion& fusion, void* fused, void* stream);

}  // namespace distr::cuda
