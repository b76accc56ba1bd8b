// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "distr/problem.h"

namespace distr::cuda::plain {

struct BackwardArguments;

// Puts the kernel that writes `arguments.d_mask` on the stream, behind those that made `arguments.delta`.
void launch_mask_gradient(DType dtype, const BackwardArguments& arguments, void* stream);

}  // namespace distr::cuda::plain
