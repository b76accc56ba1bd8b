// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of the kernel in forward.cuh, for both element types:
//   d = 64    r = 64, r = 32            two consumers and three; r = 64, two blocks an SM: heuristics.h
//   d = 128   r = 128, r = 64, r = 32   two: more registers
// and where k_hat is gathered two consumers, d = 64 for r = d / 4, d = 128 for r = d / 2 and d / 4; where it is fused
// d = 128 for r = d / 4. Columns are padded with zeros, so each serves every smaller r and dv as well. A new head dim
// is a line here.
#include "cuda/sm90/variants.h"

#include <algorithm>
#include <array>
#include <vector>

#include "cuda/sm90/fuse_keys.cuh"
#include "cuda/sm90/gather_keys.cuh"
#include "cuda/sm90/tma_keys.cuh"
#include "cuda/sm90/variants.cuh"
#include "cuda/stages.cuh"

namespace distr::cuda::sm90 {
namespace {

template <class T, int kColumns, int kValues, int kConsumers, ScaleIn kScaleIn, class KeyLoader = TmaKeys,
          int kCtasPerSm = 1>
constexpr Variant kVariant =
    variant<Config<T, kColumns, kValues, kConsumers, kScaleIn, KeyLoader, kCtasPerSm, Stages>>();

template <class T, ScaleIn kScaleIn>
constexpr std::array kShapes = {kVariant<T, 32, 64, 2, kScaleIn>,
                                kVariant<T, 64, 64, 2, kScaleIn>,
                                kVariant<T, 64, 64, 3, kScaleIn>,
                                kVariant<T, 32, 128, 2, kScaleIn>,
                                kVariant<T, 64, 128, 2, kScaleIn>,
                                kVariant<T, 128, 128, 2, kScaleIn>,
                                kVariant<T, 64, 64, 2, kScaleIn, ConsumerTmaKeys, 2>,
                                kVariant<T, 32, 128, 2, kScaleIn, GatherKeys>,
                                kVariant<T, 64, 128, 2, kScaleIn, GatherKeys>};

// In bf16.
template <ScaleIn kScaleIn>
constexpr std::array kRareShapes = {kVariant<__nv_bfloat16, 16, 64, 2, kScaleIn, GatherKeys>,
                                    kVariant<__nv_bfloat16, 32, 128, 2, kScaleIn, FuseKeys>};

// In bf16. In fp16 most of their rows go by three consumers of 64 columns.
template <ScaleIn kScaleIn>
constexpr std::array kThreeConsumers = {kVariant<__nv_bfloat16, 32, 64, 3, kScaleIn>};

template <std::size_t... kSizes>
constexpr auto joined(const std::array<Variant, kSizes>&... lists) {
  std::array<Variant, (kSizes + ...)> all{};
  auto* to = all.data();
  ((to = std::copy(lists.begin(), lists.end(), to)), ...);
  return all;
}

// With the scale in q_hat only in bf16, whose range it cannot leave before fp32 would, and only without LSE.
constexpr auto kVariants =
    joined(kShapes<__half, ScaleIn::softmax>, kShapes<__nv_bfloat16, ScaleIn::softmax>,
           kShapes<__nv_bfloat16, ScaleIn::queries>, kThreeConsumers<ScaleIn::softmax>,
           kThreeConsumers<ScaleIn::queries>, kRareShapes<ScaleIn::softmax>, kRareShapes<ScaleIn::queries>);

}  // namespace

std::span<const Variant> variants() {
  static const std::vector<Variant> all = [] {
    std::vector<Variant> result(kVariants.begin(), kVariants.end());
    result.insert(result.end(), listed_variants().begin(), listed_variants().end());
    return result;
  }();
  return all;
}

}  // namespace distr::cuda::sm90
