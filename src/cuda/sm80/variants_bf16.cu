// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "cuda/sm80/variants.cuh"

namespace distr::cuda::sm80 {
namespace {

constexpr auto kVariants = [] {
  constexpr auto& every = kEveryType<__nv_bfloat16>;
  constexpr auto& measured = kMeasured<__nv_bfloat16>;
  std::array<Variant, every.size() + measured.size()> all{};
  std::copy(measured.begin(), measured.end(), std::copy(every.begin(), every.end(), all.begin()));
  return all;
}();

}  // namespace

std::span<const Variant> variants_bf16() { return kVariants; }
std::span<const Variant> sequence_variants_bf16() { return kOfSequences<__nv_bfloat16, 64, 128, 256>; }

}  // namespace distr::cuda::sm80
