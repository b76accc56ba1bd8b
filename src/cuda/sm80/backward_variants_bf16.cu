// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "cuda/sm80/backward_variants.cuh"

namespace distr::cuda::sm80 {
namespace {

constexpr auto kVariants = [] {
  constexpr auto& wider = kBackwardVariants<__nv_bfloat16, Gradients::all>;
  std::array<BackwardVariant, 1 + wider.size()> all{
      backward_variant<__nv_bfloat16, 32, Masks::none, Gradients::of_keys>()};
  std::copy(wider.begin(), wider.end(), all.begin() + 1);
  return all;
}();

}  // namespace

std::span<const BackwardVariant> backward_variants_bf16() { return kVariants; }

}  // namespace distr::cuda::sm80
