// SPDX-License-Identifier: Apache-2.0
// The lists of compiled shapes. A new head dim is one line here.
#pragma once

#include <array>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/variants.h"

namespace distr::cuda::sm80 {

template <class C>
void launch_variant(const ForwardParameters& p, bool dependent, void* stream) {
  const std::int64_t whole = p.scheduler.count() - (p.split.end - p.split.begin);
  const dim3 ctas(static_cast<unsigned>(whole + p.split.ctas()));
  allow_shared_memory<forward<C>, sizeof(SharedStorage<C>)>();
  if (dependent) {
    launch_dependent(forward<C>, ctas, C::kThreads, sizeof(SharedStorage<C>), stream, p);
  } else {
    launch(forward<C>, ctas, C::kThreads, sizeof(SharedStorage<C>), stream, p);
  }
  if (p.split.ctas() > 0) {
    combine_splits(p, kDTypeOf<typename C::Element>, C::kRows, C::kDim, C::kSequences, stream);
  }
}

template <class C>
constexpr Variant variant() {
  return {C::kDim,       C::kGroups,        C::kRows,    C::kKeys,
          C::kMasks,     C::kMembers,       C::kThreads, static_cast<int>(sizeof(SharedStorage<C>)),
          C::kCtasPerSm, &launch_variant<C>};
}

// For every element type: tiles of 128 queries, and the exact ones of 64, which serve masks. What is not compiled is
// padded to the next d or r, or is the exact kernel's, of Q~ (forward_launch.cu).
template <class T>
inline constexpr std::array kEveryType = {
    variant<Config<T, 64, 64, 128, 1>>(),  variant<Config<T, 128, 128, 128, 1>>(), variant<Config<T, 64, 64, 64, 1>>(),
    variant<Config<T, 128, 128, 64, 1>>(), variant<Config<T, 256, 256, 64, 1>>(),  variant<Config<T, 64, 32, 128, 1>>(),
    variant<Config<T, 128, 64, 128, 1>>(),
};

// For rows of several heads and lengths that are data (sequences_launch.cu). What is narrower is padded.
template <class T, int... kDims>
inline constexpr std::array kOfSequences = {variant<Config<T, kDims, kDims, 64, 1, Stages, RowsOf::kv_head>>()...};

// For bf16, which is what is measured (docs/kernel-log.md): columns that are summed by blocks; d = 32 and, where
// columns are grouped, tiles of 64 queries and more r, and where they are taken as they are d = 256.
template <class T>
inline constexpr std::array kMeasured = {
    variant<Config<T, 64, 32, 128, 2>>(),  variant<Config<T, 64, 16, 128, 4>>(),  variant<Config<T, 128, 64, 128, 2>>(),
    variant<Config<T, 128, 32, 128, 4>>(), variant<Config<T, 32, 32, 128, 1>>(),  variant<Config<T, 32, 32, 64, 1>>(),
    variant<Config<T, 32, 16, 128, 1>>(),  variant<Config<T, 64, 16, 128, 1>>(),  variant<Config<T, 128, 32, 128, 1>>(),
    variant<Config<T, 64, 32, 64, 1>>(),   variant<Config<T, 64, 16, 64, 1>>(),   variant<Config<T, 64, 32, 64, 2>>(),
    variant<Config<T, 64, 16, 64, 4>>(),   variant<Config<T, 128, 64, 64, 1>>(),  variant<Config<T, 128, 32, 64, 1>>(),
    variant<Config<T, 128, 64, 64, 2>>(),  variant<Config<T, 256, 128, 64, 1>>(),
};

}  // namespace distr::cuda::sm80
