// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/backward_variants.cuh"

namespace distr::cuda::sm80 {

std::span<const BackwardVariant> backward_variants_f16() { return kBackwardVariants<__half, Gradients::of_keys>; }

}  // namespace distr::cuda::sm80
