// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/variants.cuh"

namespace distr::cuda::sm80 {

std::span<const Variant> variants_f16() { return kEveryType<__half>; }
std::span<const Variant> sequence_variants_f16() { return kOfSequences<__half, 128>; }

}  // namespace distr::cuda::sm80
