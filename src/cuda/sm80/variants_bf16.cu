// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/variants.cuh"

namespace distr::cuda::sm80 {

std::span<const Variant> variants_bf16() { return kVariants<__nv_bfloat16>; }

}  // namespace distr::cuda::sm80
