// SPDX-License-Identifier: Apache-2.0
// The launch that decides which far halves of tiles are kept (screen.cuh).
#pragma once

#include <cstdint>

#include "cuda/prepare/operand.h"
#include "cuda/sm90/screen_config.h"

namespace distr::cuda::sm90 {

// Words of 32 bits that a group of 64 queries has: a bit for each 64 keys.
[[nodiscard]] std::int64_t kept_words(const Problem& problem) noexcept;
// Of all groups of 64 queries.
[[nodiscard]] std::int64_t kept_count(const Problem& problem) noexcept;

class ScreenLaunch {
 public:
  // The queries begin .. end - 1 of every head, whose scores have so many columns.
  ScreenLaunch(const Problem& problem, const DeviceProblem& sizes, std::int64_t columns, std::int64_t begin,
               std::int64_t end);

  struct Tensors {
    Operand q_hat;                // [B, Hq, Nq, columns]
    const void* keys_transposed;  // K^T as transpose() leaves it
    std::int64_t column_stride;
    const std::int32_t* order;  // null: the first columns
    const float* dropped;       // null: 0
    const float2* near;
    std::uint32_t* kept;
  };
  void run(const Tensors& tensors, void* stream) const;

 private:
  DType dtype_;
  const ScreenVariant* variant_;
  ScreenParameters parameters_{};  // but for the tensors
};

}  // namespace distr::cuda::sm90
