// SPDX-License-Identifier: Apache-2.0
// In the place of src/cuda/sm90/ptx.cuh: the same functions, emulated.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "emulator/copies.h"
#include "emulator/synchronization.h"
#include "emulator/thread_block.h"
#include "emulator/warp.h"
#include "emulator/warpgroup.h"

namespace distr::cuda::ptx {

inline void barrier_init(std::uint32_t barrier, unsigned arrivals) { emulator::barrier_init(barrier, arrivals); }
inline void barrier_fence() {}
inline void barrier_arrive(std::uint32_t barrier) { emulator::barrier_arrive(barrier, 0); }
inline void barrier_arrive_expect_tx(std::uint32_t barrier, unsigned bytes) {
  emulator::barrier_arrive(barrier, bytes);
}
inline void barrier_wait(std::uint32_t barrier, unsigned parity) { emulator::barrier_wait(barrier, parity); }

// What this thread stored to shared memory is seen by wgmma and TMA from here on.
inline void fence_proxy_async() { ++emulator::thread_block().thread().proxy_fences; }
inline void fence_proxy_async_global() {}

inline void stmatrix_x4(std::uint32_t shared, const std::uint32_t (&r)[4]) { emulator::store_matrices(r, shared); }

// Looks at memory that another block writes, and lets the others go on.
inline unsigned load_acquire(const unsigned* global) {
  emulator::thread_block().poll();
  return *global;
}
inline void store_release(unsigned* global, unsigned x) { *global = x; }

inline bool elect_one_sync() { return emulator::elect_one_sync(); }

inline void tma_prefetch(const CUtensorMap& map, int column, int row, int head, int batch) {
  const int place[] = {column, row, head, batch};
  emulator::tma_prefetch(map, place, 4);
}
inline void tma_load(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int column, int row, int head,
                     int batch) {
  const int place[] = {column, row, head, batch};
  emulator::copy_box_in(shared, map, barrier, place, 4);
}
inline void tma_load(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int column, int row, int head,
                     int batch, int last) {
  const int place[] = {column, row, head, batch, last};
  emulator::copy_box_in(shared, map, barrier, place, 5);
}
inline void bulk_load(std::uint32_t shared, const void* global, unsigned bytes, std::uint32_t barrier) {
  emulator::copy_bulk_in(shared, global, bytes, barrier);
}
inline void bulk_store(void* global, std::uint32_t shared, unsigned bytes) {
  emulator::copy_bulk_out(global, shared, bytes, emulator::Reduction::none);
}
// fp32.
inline void bulk_add(float* global, std::uint32_t shared, unsigned bytes) {
  emulator::copy_bulk_out(global, shared, bytes, emulator::Reduction::add);
}
inline void bulk_commit() { emulator::copy_bulk_commit(); }
template <int kPending>
inline void bulk_wait_read() {
  emulator::copy_bulk_wait(kPending, true);
}
template <int kPending>
inline void bulk_wait() {
  emulator::copy_bulk_wait(kPending, false);
}

template <int kRegisters>
inline void setmaxnreg_dec() {
  emulator::set_registers(kRegisters);
}
template <int kRegisters>
inline void setmaxnreg_inc() {
  emulator::set_registers(kRegisters);
}

inline void wgmma_fence() { emulator::product_fence(); }
inline void wgmma_commit() { emulator::product_commit(); }
template <int kPending>
inline void wgmma_wait() {
  emulator::product_wait(kPending);
}

// Of the compiler alone.
template <int kN>
inline void warpgroup_fence_operand(float (&)[kN]) {}

enum class Major : std::uint8_t { k, mn };

template <Major kMajor>
inline void wgmma(float (&d)[16], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __half) {
  emulator::begin_product({d, 32, a, {}, {b, kMajor == Major::k}, add, emulator::Element::f16});
}
template <Major kMajor>
inline void wgmma(float (&d)[16], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __nv_bfloat16) {
  emulator::begin_product({d, 32, a, {}, {b, kMajor == Major::k}, add, emulator::Element::bf16});
}
template <Major kMajor>
inline void wgmma(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __half) {
  emulator::begin_product({d, 64, a, {}, {b, kMajor == Major::k}, add, emulator::Element::f16});
}
template <Major kMajor>
inline void wgmma(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __nv_bfloat16) {
  emulator::begin_product({d, 64, a, {}, {b, kMajor == Major::k}, add, emulator::Element::bf16});
}
template <Major kMajor>
inline void wgmma(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __half) {
  emulator::begin_product({d, 128, a, {}, {b, kMajor == Major::k}, add, emulator::Element::f16});
}
template <Major kMajor>
inline void wgmma(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __nv_bfloat16) {
  emulator::begin_product({d, 128, a, {}, {b, kMajor == Major::k}, add, emulator::Element::bf16});
}

// The same with a, too, in shared memory, whose rows lie along k or along the 64 rows of d.
template <Major kMajorA, Major kMajorB>
inline void wgmma(float (&d)[8], std::uint64_t a, std::uint64_t b, bool add, __half) {
  emulator::begin_product(
      {d, 16, nullptr, {a, kMajorA == Major::k}, {b, kMajorB == Major::k}, add, emulator::Element::f16});
}
template <Major kMajorA, Major kMajorB>
inline void wgmma(float (&d)[8], std::uint64_t a, std::uint64_t b, bool add, __nv_bfloat16) {
  emulator::begin_product(
      {d, 16, nullptr, {a, kMajorA == Major::k}, {b, kMajorB == Major::k}, add, emulator::Element::bf16});
}
template <Major kMajorA, Major kMajorB>
inline void wgmma(float (&d)[16], std::uint64_t a, std::uint64_t b, bool add, __half) {
  emulator::begin_product(
      {d, 32, nullptr, {a, kMajorA == Major::k}, {b, kMajorB == Major::k}, add, emulator::Element::f16});
}
template <Major kMajorA, Major kMajorB>
inline void wgmma(float (&d)[16], std::uint64_t a, std::uint64_t b, bool add, __nv_bfloat16) {
  emulator::begin_product(
      {d, 32, nullptr, {a, kMajorA == Major::k}, {b, kMajorB == Major::k}, add, emulator::Element::bf16});
}
template <Major kMajorA, Major kMajorB>
inline void wgmma(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add, __half) {
  emulator::begin_product(
      {d, 64, nullptr, {a, kMajorA == Major::k}, {b, kMajorB == Major::k}, add, emulator::Element::f16});
}
template <Major kMajorA, Major kMajorB>
inline void wgmma(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add, __nv_bfloat16) {
  emulator::begin_product(
      {d, 64, nullptr, {a, kMajorA == Major::k}, {b, kMajorB == Major::k}, add, emulator::Element::bf16});
}
template <Major kMajorA, Major kMajorB>
inline void wgmma(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add, __half) {
  emulator::begin_product(
      {d, 128, nullptr, {a, kMajorA == Major::k}, {b, kMajorB == Major::k}, add, emulator::Element::f16});
}
template <Major kMajorA, Major kMajorB>
inline void wgmma(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add, __nv_bfloat16) {
  emulator::begin_product(
      {d, 128, nullptr, {a, kMajorA == Major::k}, {b, kMajorB == Major::k}, add, emulator::Element::bf16});
}

}  // namespace distr::cuda::ptx
