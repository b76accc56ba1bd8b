// SPDX-License-Identifier: Apache-2.0
// 2^x by the units that multiply and add, for kernels that wait for the special function unit: that makes 16 a clock of
// an SM, an eighth of what the others do.
#pragma once

#include "cuda/ptx.cuh"

namespace distr::cuda {

// 2^x with a relative error of 2e-7 at most, as ptx::exp2, from -126 up; 0 from -126.5 down, infinite from 127.5 up,
// NaN for NaN. The nearest integer makes the power, what is left goes to a polynomial.
__device__ __forceinline__ float exp2_by_polynomial(float x) {
  constexpr float kShift = 0x1.8p23F + 127;  // x + kShift: its lowest bits are the nearest integer's exponent
  const float bounded = ptx::clamp(x, -127.0F, 128.0F);
  const float shifted = bounded + kShift;
  const float rest = bounded - (shifted - kShift);
  float p = 1.326472727e-03F;  // minimax of the relative error over -1/2 to 1/2
  for (const float coefficient : {9.671512733e-03F, 5.550733744e-02F, 2.402224208e-01F, 6.931469776e-01F, 1.0F}) {
    p = fmaf(p, rest, coefficient);
  }
  return p * __uint_as_float(__float_as_uint(shifted) << 23);  // a product, as it keeps a NaN whatever its bits
}

}  // namespace distr::cuda
