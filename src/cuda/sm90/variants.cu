// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of the kernel in forward.cuh, for both element types:
//   d = 64    exact, r = 32, r = 16   two consumers or, where columns are grouped, three: forward_launch.cu chooses
//   d = 128   exact, r = 64, r = 32   two: more registers
// Columns are padded with zeros by the copy engine, so each serves every smaller r and dv as well.
// A new head dim is a line here.
#include "cuda/sm90/variants.h"

#include <array>

#include "cuda/sm90/variants.cuh"

namespace distr::cuda::sm90 {
namespace {

// The scale can be a part of q_hat where it cannot leave the range of its type.
template <class T>
constexpr Scores kGrouped = kWideRange<T> ? Scores::logarithms : Scores::raw;

template <class T>
constexpr std::array kShapes = {
    variant<Config<T, 16, 64, 2, kGrouped<T>>>(),  variant<Config<T, 16, 64, 3, kGrouped<T>>>(),
    variant<Config<T, 32, 64, 2, kGrouped<T>>>(),  variant<Config<T, 32, 64, 3, kGrouped<T>>>(),
    variant<Config<T, 64, 64, 2, Scores::raw>>(),  variant<Config<T, 32, 128, 2, kGrouped<T>>>(),
    variant<Config<T, 64, 128, 2, kGrouped<T>>>(), variant<Config<T, 128, 128, 2, Scores::raw>>()};

constexpr std::array kVariants = [] {
  std::array<Variant, 2 * kShapes<__half>.size()> all{};
  for (std::size_t n = 0; n < kShapes<__half>.size(); ++n) {
    all[2 * n] = kShapes<__half>[n];
    all[2 * n + 1] = kShapes<__nv_bfloat16>[n];
  }
  return all;
}();

}  // namespace

std::span<const Variant> variants() { return kVariants; }

}  // namespace distr::cuda::sm90
