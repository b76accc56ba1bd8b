// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of the kernel in forward.cuh with near keys (method, 8), for both element types:
//   d = 64    r = 64                     Q~ K^T
//   d = 128   r = 128; r = 64            Q~ K^T; k_hat gathered
// with two consumers, and the scale in the softmax, as near scores are products with Q. Columns are padded with zeros,
// so each serves every smaller r, d and dv as well.
#include <array>

#include "cuda/sm90/near_keys.cuh"
#include "cuda/sm90/variants.cuh"
#include "cuda/sm90/variants.h"
#include "cuda/stages.cuh"

namespace distr::cuda::sm90 {
namespace {

template <class T, int kColumns, int kValues, class KeyLoader>
constexpr Variant kVariant = variant<Config<T, kColumns, kValues, 2, ScaleIn::softmax, KeyLoader, 1, Stages>>();

constexpr std::array kNearVariants = {
    kVariant<__half, 64, 64, NearTmaKeys>,          kVariant<__half, 128, 128, NearTmaKeys>,
    kVariant<__half, 64, 128, NearGatherKeys>,      kVariant<__nv_bfloat16, 64, 64, NearTmaKeys>,
    kVariant<__nv_bfloat16, 128, 128, NearTmaKeys>, kVariant<__nv_bfloat16, 64, 128, NearGatherKeys>};

}  // namespace

std::span<const Variant> near_variants() { return kNearVariants; }

}  // namespace distr::cuda::sm90
