// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of the kernel in screen.cuh, for both element types. Columns are padded with zeros, so
// each serves every smaller r.
#include <array>

#include "cuda/sm90/screen.cuh"

namespace distr::cuda::sm90 {
namespace {

template <class C>
void launch_screen(const ScreenParameters& p, void* stream) {
  allow_shared_memory<screen<C>, sizeof(ScreenStorage<C>)>();
  launch_dependent(screen<C>, dim3(p.scheduler.count()), C::kThreads, sizeof(ScreenStorage<C>), stream, p);
}

template <class T, int kColumns>
constexpr ScreenVariant kVariant = {kDTypeOf<T>, kColumns,
                                    static_cast<int>(sizeof(ScreenStorage<ScreenConfig<T, kColumns>>)),
                                    &launch_screen<ScreenConfig<T, kColumns>>};

constexpr std::array kVariants = {kVariant<__half, 32>,        kVariant<__half, 64>,
                                  kVariant<__half, 128>,       kVariant<__nv_bfloat16, 32>,
                                  kVariant<__nv_bfloat16, 64>, kVariant<__nv_bfloat16, 128>};

}  // namespace

std::span<const ScreenVariant> screen_variants() { return kVariants; }

}  // namespace distr::cuda::sm90
