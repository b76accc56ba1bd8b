// SPDX-License-Identifier: Apache-2.0
// What far scores keep of the columns that they drop: a constant of every row of Q (method, 8).
#pragma once

#include <cstdint>

#include "cuda/prepare/operand.h"
#include "cuda/problem.h"

namespace distr::cuda {

// dropped[B, Hq, Nq] = sum over a row's dropped columns c of q_c kbar_c, without the scale, for the rows from first_row
// on; the others are left as they are. q: fp16 or bf16. order: [B, Hq, blocks, d]; key_means: [B, Hkv, blocks or 1, d].
void dropped_scores(DType dtype, const DeviceProblem& problem, std::int64_t first_row, const Operand& q,
                    const std::int32_t* order, const float* key_means, float* dropped, void* stream);

}  // namespace distr::cuda
