// SPDX-License-Identifier: Apache-2.0
// The compiled kernels, for the host: what each takes, and how it is launched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/sm80/config.h"
#include "distr/plan.h"

namespace distr::cuda::sm80 {

struct Variant {
  int dim, groups, rows, keys;  // Config's; groups == dim: exact attention
  bool masks;
  int members;  // rows of K^T that it adds
  int threads, shared_bytes, ctas_per_sm;
  void (*launch)(const ForwardParameters& parameters, bool dependent, void* stream);  // dependent: dependent_launch.cuh
};

[[nodiscard]] inline TileShape tile_of(const Variant& variant) noexcept {
  return {variant.rows, variant.keys, variant.dim, variant.groups};
}

// In order of preference.
std::span<const Variant> variants_f16();
std::span<const Variant> variants_bf16();
// Config::kSequences.
std::span<const Variant> sequence_variants_f16();
std::span<const Variant> sequence_variants_bf16();

}  // namespace distr::cuda::sm80
