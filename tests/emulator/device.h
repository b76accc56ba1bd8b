// SPDX-License-Identifier: Apache-2.0
// What nvcc provides to a kernel without an include, for g++: every CUDA source is compiled with this header in front
// of it (-include). All macros of the emulator are here.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "emulator/device_index.h"
#include "emulator/launch.h"
#include "emulator/runtime.h"
#include "emulator/synchronization.h"
#include "emulator/warp.h"

#undef __shared__
#define __shared__ thread_local
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __maxnreg__
#define __maxnreg__(...)
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_LIST__ 900

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() { distr::emulator::block_sync(distr::emulator::Vote::none, false); }
inline int __syncthreads_or(int holds) { return distr::emulator::block_sync(distr::emulator::Vote::any, holds != 0); }
inline int __syncthreads_and(int holds) { return distr::emulator::block_sync(distr::emulator::Vote::all, holds != 0); }
inline void __syncwarp(unsigned mask = ~0U) { distr::emulator::warp_sync(mask); }
inline unsigned __ballot_sync(unsigned mask, int holds) { return distr::emulator::ballot(mask, holds != 0); }
inline int __any_sync(unsigned mask, int holds) { return distr::emulator::ballot(mask, holds != 0) != 0 ? 1 : 0; }

template <class T>
T shuffle_value(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = distr::emulator::shuffle(mask, bits, static_cast<int>(from));
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const auto segment = static_cast<unsigned>(width);
  const unsigned lane = threadIdx.x % 32;
  return shuffle_value(mask, value, lane / segment * segment + static_cast<unsigned>(from) % segment);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return shuffle_value(mask, value, threadIdx.x % 32 ^ static_cast<unsigned>(bits));
}

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  unsigned equal = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    equal |= (mask >> lane & 1U) != 0 && shuffle_value(mask, value, lane) == value ? 1U << lane : 0U;
  }
  return equal;
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (unsigned n = 0; n < 4; ++n) {
    const unsigned choice = selector >> 4 * n;
    const auto byte = static_cast<unsigned>(bytes >> 8 * (choice & 7) & 0xFF);
    result |= ((choice & 8) != 0 ? (byte >> 7) * 0xFF : byte) << 8 * n;
  }
  return result;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __fdividef(float x, float y) { return x / y; }
[[noreturn]] void __trap();

// A plain exchange is atomic here, because blocks run one at a time between the points where threads are switched.
template <class T>
T atomicAdd(T* to, T x) {
  return std::exchange(*to, *to + x);
}
inline unsigned atomicOr(unsigned* to, unsigned bits) {
  const unsigned before = *to;
  *to = before | bits;
  return before;
}

inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void cudaGridDependencySynchronize() { distr::emulator::wait_on_dependent_grids(); }

namespace distr::emulator {

template <class... Parameters, class... Arguments>
void enqueue(void (*kernel)(Parameters...), Launch launch, cudaStream_t stream, const Arguments&... arguments) {
  const std::tuple<std::remove_cvref_t<Parameters>...> all(arguments...);
  enqueue(stream, [=] {
    Launch run = launch;
    run.kernel = [&] { std::apply(kernel, all); };
    run_grid(run);
  });
}

}  // namespace distr::emulator

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const bool dependent = config->numAttrs > 0;  // launches use no other attribute
  distr::emulator::enqueue(kernel, {config->gridDim, config->blockDim, config->dynamicSmemBytes, {}, dependent},
                           config->stream, arguments...);
  return cudaSuccess;
}
