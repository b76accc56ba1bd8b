// SPDX-License-Identifier: Apache-2.0
// In the place of src/cuda/sm90/ptx.cuh: the same functions, emulated.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/ptx.cuh"
#include "emulator/copies.h"
#include "emulator/synchronization.h"
#include "emulator/warpgroup.h"

namespace distr::cuda::ptx {

inline void barrier_init(std::uint32_t barrier, unsigned arrivals) { emulator::barrier_init(barrier, arrivals); }
inline void barrier_fence() {}
inline void barrier_arrive(std::uint32_t barrier) { emulator::barrier_arrive(barrier, 0); }
inline void barrier_arrive_expect(std::uint32_t barrier, unsigned bytes) { emulator::barrier_arrive(barrier, bytes); }
inline void barrier_expect(std::uint32_t barrier, unsigned bytes) { emulator::barrier_expect(barrier, bytes); }
inline bool barrier_test(std::uint32_t barrier, unsigned parity) { return emulator::barrier_test(barrier, parity); }
inline void barrier_wait(std::uint32_t barrier, unsigned parity) { emulator::barrier_wait(barrier, parity); }

inline void named_barrier_sync(int number, int threads) { emulator::named_barrier_sync(number, threads); }
inline void named_barrier_arrive(int number, int threads) { emulator::named_barrier_arrive(number, threads); }

// What this thread stored to shared memory is seen by wgmma and the copy engine from here on.
inline void fence_proxy_async_global() {}
inline void fence_proxy_async() { ++emulator::block().thread().proxy_fences; }

inline void cp_async_arrive(std::uint32_t barrier) { emulator::copy_async_arrive(barrier); }

inline void copy_box(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int column, int row, int head,
                     int batch) {
  const int place[] = {column, row, head, batch};
  emulator::copy_box_in(shared, map, barrier, place, 4);
}
inline void store_box(const CUtensorMap& map, std::uint32_t shared, int column, int row, int head, int batch) {
  const int place[] = {column, row, head, batch};
  emulator::copy_box_out(map, shared, place, 4, emulator::Reduction::none);
}
inline void add_box(const CUtensorMap& map, std::uint32_t shared, int column, int row, int head, int batch) {
  const int place[] = {column, row, head, batch};
  emulator::copy_box_out(map, shared, place, 4, emulator::Reduction::add);
}
inline void copy_bulk(std::uint32_t shared, const void* global, unsigned bytes, std::uint32_t barrier) {
  emulator::copy_bulk_in(shared, global, bytes, barrier);
}
inline void store_bulk(void* global, std::uint32_t shared, unsigned bytes) {
  emulator::copy_bulk_out(global, shared, bytes, emulator::Reduction::none);
}
// fp32.
inline void add_bulk(float* global, std::uint32_t shared, unsigned bytes) {
  emulator::copy_bulk_out(global, shared, bytes, emulator::Reduction::add);
}
inline void bulk_commit() { emulator::copy_bulk_commit(); }
template <int kPending>
void bulk_wait_read() {
  emulator::copy_bulk_wait(kPending, true);
}
template <int kPending>
void bulk_wait() {
  emulator::copy_bulk_wait(kPending, false);
}

template <int kRegisters>
void give_registers() {
  emulator::set_registers(kRegisters);
}
template <int kRegisters>
void take_registers() {
  emulator::set_registers(kRegisters);
}

inline void wgmma_fence() { emulator::product_fence(); }
inline void wgmma_commit() { emulator::product_commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::product_wait(kPending);
}

// Of the compiler alone.
template <std::size_t kCount>
void settle(float (&)[kCount]) {}

enum class Rows : std::uint8_t { along_k, along_n };

template <Rows kRows, std::size_t kCount, class T>
void wgmma(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, bool add, T) {
  emulator::begin_product({d, static_cast<int>(2 * kCount), a, {}, {b, kRows == Rows::along_k}, add, element_of(T{})});
}

// Both operands in shared memory; along_n of the left one: its rows lie along M.
template <Rows kLeft, Rows kRight, std::size_t kCount, class T>
void wgmma(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool add, T) {
  emulator::begin_product({d,
                           static_cast<int>(2 * kCount),
                           nullptr,
                           {a, kLeft == Rows::along_k},
                           {b, kRight == Rows::along_k},
                           add,
                           element_of(T{})});
}

}  // namespace distr::cuda::ptx
