// SPDX-License-Identifier: Apache-2.0
// In the place of src/cuda/ptx.cuh: the same functions, emulated.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "emulator/block.h"
#include "emulator/copies.h"
#include "emulator/device.h"
#include "emulator/shared_memory.h"
#include "emulator/warp.h"

namespace distr::cuda::ptx {

constexpr emulator::Element element_of(__half) { return emulator::Element::f16; }
constexpr emulator::Element element_of(__nv_bfloat16) { return emulator::Element::bf16; }

inline std::uint32_t shared_address(const void* pointer) { return emulator::shared_memory().address(pointer); }

inline void cp_async_16(std::uint32_t shared, const void* global, bool valid) {
  emulator::copy_async_16(shared, global, valid);
}
inline void cp_async_commit() { emulator::copy_async_commit(); }
template <int kPending>
void cp_async_wait() {
  emulator::copy_async_wait(kPending);
}

template <class T>
void store_shared(std::uint32_t shared, T x, const char* user) {
  std::memcpy(emulator::shared_memory().at(shared, sizeof(T), sizeof(T), user), &x, sizeof(T));
  emulator::shared_memory().stored(shared, sizeof(T), emulator::block().thread());
}
template <class T>
T load_shared(std::uint32_t shared, const char* user) {
  emulator::shared_memory().require_settled(shared, sizeof(T), emulator::SharedMemory::Proxy::generic, user);
  T x;
  std::memcpy(&x, emulator::shared_memory().at(shared, sizeof(T), sizeof(T), user), sizeof(T));
  return x;
}
inline void store_shared_4(std::uint32_t shared, std::uint32_t x) { store_shared(shared, x, "st.shared"); }
inline void store_shared_8(std::uint32_t shared, std::uint64_t x) { store_shared(shared, x, "st.shared"); }
inline void store_shared_16(std::uint32_t shared, uint4 x) { store_shared(shared, x, "st.shared"); }
inline std::uint32_t load_shared_4(std::uint32_t shared) { return load_shared<std::uint32_t>(shared, "ld.shared"); }
inline std::uint64_t load_shared_8(std::uint32_t shared) { return load_shared<std::uint64_t>(shared, "ld.shared"); }
inline uint4 load_shared_16(std::uint32_t shared) { return load_shared<uint4>(shared, "ld.shared"); }

inline void red_add(float* global, float x) { *global += x; }
inline void red_add_4(float* global, const float (&x)[4]) {
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0) {
    emulator::block().fail("red.v4 at an address that is not a multiple of 16");
  }
  for (int i = 0; i < 4; ++i) {
    global[i] += x[i];
  }
}

inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t shared) { emulator::load_matrices(r, 4, shared, false); }
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t shared) {
  emulator::load_matrices(r, 4, shared, true);
}
inline void stmatrix_x4(std::uint32_t shared, const std::uint32_t (&r)[4]) {
  emulator::store_matrices(r, 4, shared, false);
}
inline void stmatrix_x4_trans(std::uint32_t shared, const std::uint32_t (&r)[4]) {
  emulator::store_matrices(r, 4, shared, true);
}
inline void stmatrix_x2(std::uint32_t shared, const std::uint32_t (&r)[2]) {
  emulator::store_matrices(r, 2, shared, false);
}
inline void stmatrix_x2_trans(std::uint32_t shared, const std::uint32_t (&r)[2]) {
  emulator::store_matrices(r, 2, shared, true);
}

template <class T>
void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, T) {
  emulator::mma_16x8x16(d, a, b0, b1, element_of(T{}));
}

inline unsigned opaque(unsigned x) { return x; }
template <class T>
T* opaque(T* x) {
  return x;
}

inline float exp2(float x) {
  const float y = std::exp2(x);
  return std::fpclassify(y) == FP_SUBNORMAL ? 0.0F : y;
}

template <class T>
std::uint32_t pack_as(float low, float high) {
  return common::from_float<T>(low).bits | std::uint32_t{common::from_float<T>(high).bits} << 16;
}
inline std::uint32_t pack(float low, float high, __half) { return pack_as<common::Float16>(low, high); }
inline std::uint32_t pack(float low, float high, __nv_bfloat16) { return pack_as<common::BFloat16>(low, high); }

// Looks at memory that another block writes, and lets the others go on.
inline unsigned load_acquire(const unsigned* global) {
  emulator::block().poll();
  return *global;
}
inline void store_release(unsigned* global, unsigned x) { *global = x; }
inline void red_add_release(unsigned* global, unsigned x) { *global += x; }

}  // namespace distr::cuda::ptx
