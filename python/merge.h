// SPDX-License-Identifier: Apache-2.0
// The operator merge.
#pragma once

#include <vector>

#include "tensors.h"

namespace distr::binding {

// Merges attention of the same rows over disjoint parts of the keys, outs [B, H, N, dv] and lses [B, H, N], into out
// [B, H, N, dv], whose rows are contiguous, and lse [B, H, N], which may be those of a part. The dtypes of outs may
// differ from out's.
void merge_parts(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses, const Tensor& out, Tensor lse);

}  // namespace distr::binding
