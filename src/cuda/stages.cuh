// SPDX-License-Identifier: Apache-2.0
// The stages of a forward kernel that can be taken out of it. A program that measures what a stage costs compiles the
// kernel with other functions in the place of these (an ablation); the library has these alone.
#pragma once

namespace distr::cuda {

struct Stages {
  // Rows whose fixed row max turns out to be too far from their scores are computed again.
  static constexpr bool kRepeatsRows = true;

  // `exp2` of a score.
  template <class Exp2>
  __device__ __forceinline__ static float exponential(float exponent, const Exp2& exp2) {
    return exp2(exponent);
  }
  // A step that makes a tile of k_hat of rows or columns of K.
  template <class Step>
  __device__ __forceinline__ static void fusion(const Step& step) {
    step();
  }
  // A step that loads tiles of V or multiplies them.
  template <class Step>
  __device__ __forceinline__ static void values(const Step& step) {
    step();
  }
};

}  // namespace distr::cuda
