// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of the kernel in forward.cuh, for both element types:
//   d = 64    exact, r = 32, r = 16
//   d = 128   exact, r = 64, r = 32
// Columns are padded with zeros by the copy engine, so each serves every smaller r and dv as well.
// A new head dim is a line here.
#include "cuda/sm90/variants.h"

#include <array>

#include "cuda/sm90/variants.cuh"

namespace distr::cuda::sm90 {
namespace {

template <class T, int kColumns>
constexpr Variant exact() {
  return variant<Config<T, kColumns, kColumns, Scores::raw>>();
}
// The scale can be a part of q_hat where it cannot leave the range of its type.
template <class T, int kColumns, int kValues>
constexpr Variant grouped() {
  return variant<Config<T, kColumns, kValues, kWideRange<T> ? Scores::logarithms : Scores::raw>>();
}

template <class T>
constexpr std::array kShapes = {grouped<T, 16, 64>(),  grouped<T, 32, 64>(),  exact<T, 64>(),
                                grouped<T, 32, 128>(), grouped<T, 64, 128>(), exact<T, 128>()};

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
