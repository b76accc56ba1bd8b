// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of the kernel in forward.cuh, for both element types:
//   d = 64    exact, r = 32, r = 16   two consumers or, where columns are grouped, three: forward_launch.cu chooses
//   d = 128   exact, r = 64, r = 32   two: more registers
// Columns are padded with zeros by the copy engine, so each serves every smaller r and dv as well.
// A new head dim is a line here.
#include "cuda/sm90/variants.h"

#include <algorithm>
#include <array>

#include "cuda/sm90/variants.cuh"

namespace distr::cuda::sm90 {
namespace {

template <class T, Scores kScores>
constexpr std::array kGrouped = {variant<Config<T, 16, 64, 2, kScores>>(),  variant<Config<T, 16, 64, 3, kScores>>(),
                                 variant<Config<T, 32, 64, 2, kScores>>(),  variant<Config<T, 32, 64, 3, kScores>>(),
                                 variant<Config<T, 32, 128, 2, kScores>>(), variant<Config<T, 64, 128, 2, kScores>>()};

template <class T>
constexpr std::array kExact = {variant<Config<T, 64, 64, 2, Scores::raw>>(),
                               variant<Config<T, 128, 128, 2, Scores::raw>>()};

template <std::size_t... kSizes>
constexpr auto joined(const std::array<Variant, kSizes>&... lists) {
  std::array<Variant, (kSizes + ...)> all{};
  auto* to = all.data();
  ((to = std::copy(lists.begin(), lists.end(), to)), ...);
  return all;
}

// With the scale in q_hat only in bf16, whose range it cannot leave before fp32 would.
constexpr auto kVariants = joined(kGrouped<__half, Scores::raw>, kExact<__half>, kGrouped<__nv_bfloat16, Scores::raw>,
                                  kExact<__nv_bfloat16>, kGrouped<__nv_bfloat16, Scores::logarithms>);

}  // namespace

std::span<const Variant> variants() { return kVariants; }

}  // namespace distr::cuda::sm90
