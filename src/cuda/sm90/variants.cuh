// SPDX-License-Identifier: Apache-2.0
// How a compiled shape of the kernel in forward.cuh is launched.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/near_far.cuh"
#include "cuda/sm90/variants.h"
#include "cuda/sm90/voted_forward.cuh"

namespace distr::cuda::sm90 {

template <class C>
void launch_variant(const ForwardParameters& p, void* stream) {
  constexpr auto kKernel = [] {
    if constexpr (C::kVotes) {
      return &forward_voted<C>;
    } else if constexpr (C::kIsRuns) {
      return &forward_near_far<C>;
    } else {
      return &forward<C>;
    }
  }();
  allow_shared_memory<kKernel, sizeof(typename C::Storage)>();
  launch_dependent(kKernel, dim3(p.scheduler.count()), C::kThreads, sizeof(typename C::Storage), stream, p);
}

template <class C>
constexpr Variant variant() {
  return {kDTypeOf<typename C::Element>,
          C::kScaleIn,
          C::kColumns,
          C::kNearColumns,
          C::kValues,
          C::kRows,
          C::kKeys,
          C::KeyLoader::kLoad,
          C::kCtasPerSm,
          C::kCapsScores,
          C::kWindows == Windows::taken,
          C::kTakesLengths,
          C::kThreads,
          static_cast<int>(sizeof(typename C::Storage)),
          &launch_variant<C>};
}

}  // namespace distr::cuda::sm90
