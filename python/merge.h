// SPDX-License-Identifier: Apache-2.0
// The operator merge_into.
#pragma once

#include "tensors.h"

namespace distr::binding {

// Merges attention of the same rows over other keys, more_out and more_lse, into out [B, H, N, dv], whose rows are
// contiguous, and lse [B, H, N]. more_out may be of another dtype.
void merge_into(const Tensor& out, Tensor lse, const Tensor& more_out, const Tensor& more_lse);

}  // namespace distr::binding
