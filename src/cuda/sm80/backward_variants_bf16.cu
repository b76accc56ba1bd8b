// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/backward_variants.cuh"

namespace distr::cuda::sm80 {

std::span<const BackwardVariant> backward_variants_bf16() { return kBackwardVariants<__nv_bfloat16>; }

}  // namespace distr::cuda::sm80
