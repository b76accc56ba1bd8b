// SPDX-License-Identifier: Apache-2.0
// In the place of src/cuda/ptx.cuh: the same functions, emulated.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/half.h"
#include "emulator/copies.h"
#include "emulator/shared_memory.h"
#include "emulator/thread_block.h"
#include "emulator/warp.h"

namespace distr::emulator {

template <class T>
void store_shared(std::uint32_t shared, T x) {
  std::memcpy(shared_memory().at(shared, sizeof(T), sizeof(T), "st.shared"), &x, sizeof(T));
  shared_memory().stored(shared, sizeof(T), thread_block().thread());
}
template <class T>
T load_shared(std::uint32_t shared) {
  shared_memory().require_settled(shared, sizeof(T), SharedMemory::Proxy::generic, "ld.shared");
  T x;
  std::memcpy(&x, shared_memory().at(shared, sizeof(T), sizeof(T), "ld.shared"), sizeof(T));
  return x;
}

template <class T>
std::uint32_t packed(float low, float high) {
  return common::from_float<T>(low).bits | std::uint32_t{common::from_float<T>(high).bits} << 16;
}

}  // namespace distr::emulator

namespace distr::cuda::ptx {

inline std::uint32_t shared_address(const void* pointer) { return emulator::shared_memory().address(pointer); }

inline void cp_async_16(std::uint32_t shared, const void* global, bool valid) {
  emulator::copy_async_16(shared, global, valid);
}
inline void cp_async_16_if(bool issues, std::uint32_t shared, const void* global) {
  if (issues) {
    emulator::copy_async_16(shared, global, true);
  }
}
inline void cp_async_commit() { emulator::copy_async_commit(); }
template <int kPending>
inline void cp_async_wait() {
  emulator::copy_async_wait(kPending);
}

inline void store_shared_4(std::uint32_t shared, std::uint32_t x) { emulator::store_shared(shared, x); }
inline std::uint32_t load_shared_4(std::uint32_t shared) { return emulator::load_shared<std::uint32_t>(shared); }
inline void store_shared_8(std::uint32_t shared, uint2 x) { emulator::store_shared(shared, x); }
inline uint2 load_shared_8(std::uint32_t shared) { return emulator::load_shared<uint2>(shared); }
inline void store_shared_16(std::uint32_t shared, uint4 x) { emulator::store_shared(shared, x); }
inline uint4 load_shared_16(std::uint32_t shared) { return emulator::load_shared<uint4>(shared); }

inline float max_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : x < y ? y : x; }

inline int ordered_bits(float x) { return std::bit_cast<int>(std::isnan(x) ? std::fabs(x) : x); }
inline int max3(int x, int y, int z) { return std::max({x, y, z}); }

inline void named_barrier_sync(int id, int threads) { emulator::named_barrier_sync(id, threads); }
inline unsigned named_barrier_count(int id, int threads, bool holds) {
  return emulator::named_barrier_count(id, threads, holds);
}
inline bool named_barrier_or(int id, int threads, bool holds) { return named_barrier_count(id, threads, holds) != 0; }
inline void named_barrier_arrive(int id, int threads) { emulator::named_barrier_arrive(id, threads); }

inline void red_add(float* global, float x) { *global += x; }
inline void red_add_4(float* global, const float (&x)[4]) {
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0) {
    emulator::thread_block().fail("red.v4 at an address that is not a multiple of 16");
  }
  for (int i = 0; i < 4; ++i) {
    global[i] += x[i];
  }
}

inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t shared) { emulator::load_matrices(r, shared, false); }
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t shared) { emulator::load_matrices(r, shared, true); }
inline void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, __half) {
  emulator::mma_16x8x16(d, a, b0, b1, emulator::Element::f16);
}
inline void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, __nv_bfloat16) {
  emulator::mma_16x8x16(d, a, b0, b1, emulator::Element::bf16);
}

inline unsigned opaque(unsigned x) { return x; }
inline float opaque(float x) { return x; }
template <class T>
inline T* opaque(T* x) {
  return x;
}

inline float exp2(float x) {
  const float y = std::exp2(x);
  return std::fpclassify(y) == FP_SUBNORMAL ? 0.0F : y;
}

inline float reciprocal(float x) { return 1 / x; }

inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

inline std::uint32_t pack(float low, float high, __half) { return emulator::packed<common::Float16>(low, high); }
inline std::uint32_t pack(float low, float high, __nv_bfloat16) {
  return emulator::packed<common::BFloat16>(low, high);
}

}  // namespace distr::cuda::ptx
