// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of the kernel in forward.cuh, for both element types:
//   d = 64    r = 64, r = 32, r = 16    two consumers and three; r = 64, two blocks an SM: heuristics.h
//   d = 128   r = 128, r = 64, r = 32   two: more registers
// and where k_hat is picked two consumers, d = 64 for r = d / 4, d = 128 for r = d / 2 and d / 4; where it is summed
// d = 128 for r = d / 4. Columns are padded with zeros, so each serves every smaller r and dv as well. A new head dim
// is a line here.
#include "cuda/sm90/variants.h"

#include <algorithm>
#include <array>

#include "cuda/sm90/variants.cuh"

namespace distr::cuda::sm90 {
namespace {

template <class T, int kColumns, int kValues, int kConsumers, Scores kScores, KeySource kSource = KeySource::copied,
          int kBlocks = 1>
constexpr Variant kVariant =
    variant<Config<T, kColumns, kValues, kConsumers, kScores, kSource, Without::nothing, kBlocks>>();

template <class T, Scores kScores>
constexpr std::array kShapes = {kVariant<T, 16, 64, 2, kScores>,
                                kVariant<T, 16, 64, 3, kScores>,
                                kVariant<T, 32, 64, 2, kScores>,
                                kVariant<T, 32, 64, 3, kScores>,
                                kVariant<T, 64, 64, 2, kScores>,
                                kVariant<T, 64, 64, 3, kScores>,
                                kVariant<T, 64, 64, 2, kScores, KeySource::copied, 2>,
                                kVariant<T, 32, 128, 2, kScores>,
                                kVariant<T, 64, 128, 2, kScores>,
                                kVariant<T, 128, 128, 2, kScores>,
                                kVariant<T, 16, 64, 2, kScores, KeySource::picked>,
                                kVariant<T, 32, 128, 2, kScores, KeySource::picked>,
                                kVariant<T, 64, 128, 2, kScores, KeySource::picked>,
                                kVariant<T, 32, 128, 2, kScores, KeySource::summed>};

template <std::size_t... kSizes>
constexpr auto joined(const std::array<Variant, kSizes>&... lists) {
  std::array<Variant, (kSizes + ...)> all{};
  auto* to = all.data();
  ((to = std::copy(lists.begin(), lists.end(), to)), ...);
  return all;
}

// With the scale in q_hat only in bf16, whose range it cannot leave before fp32 would.
constexpr auto kVariants = joined(kShapes<__half, Scores::raw>, kShapes<__nv_bfloat16, Scores::raw>,
                                  kShapes<__nv_bfloat16, Scores::logarithms>);

}  // namespace

std::span<const Variant> variants() { return kVariants; }

}  // namespace distr::cuda::sm90
