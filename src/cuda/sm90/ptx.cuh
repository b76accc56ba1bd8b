// SPDX-License-Identifier: Apache-2.0
// Hopper's own instructions, one a function: barriers of asynchronous copies, the copies of tiles, wgmma.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace distr::cuda::ptx {

// A barrier in shared memory that ends a phase when `arrivals` threads have arrived and the bytes expected have come.
__device__ inline void barrier_init(std::uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the barriers' initial state visible to TMA.
__device__ inline void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_expect_tx(std::uint32_t barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of the phase of this parity. Traps after many polls: a mistake must not hang the device.
__device__ inline void barrier_wait(std::uint32_t barrier, unsigned parity) {
  constexpr unsigned kMaxPolls = 1U << 24;
#pragma unroll 1
  for (unsigned poll = 0; poll < kMaxPolls; ++poll) {
    unsigned done = 0;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    if (done != 0) {
      return;
    }
  }

  __trap();
}

// Whether the calling lane is the one of its warp that is elected. All lanes call it.
__device__ inline bool elect_one_sync() {
  unsigned elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// Copies the box of `map` at (column, row, head, batch) to shared memory; zeros where that is outside the tensor.
__device__ inline void tma_load(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int column,
                                int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// The same of a map with five axes.
__device__ inline void tma_load(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int column,
                                int row, int head, int batch, int last) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(last)
      : "memory");
}

// Brings what tma_load() would copy to the L2.
__device__ inline void tma_prefetch(const CUtensorMap& map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column),
               "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// `bytes` from global to shared memory, both aligned to 16 bytes, counted by the barrier.
__device__ inline void bulk_load(std::uint32_t shared, const void* global, unsigned bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
// The other way, by TMA too: writes, or adds fp32 to what is there. Both join this thread's next group.
__device__ inline void bulk_store(void* global, std::uint32_t shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_add(float* global, std::uint32_t shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups still read shared memory, or still write anything.
template <int kPending>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ inline void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Between ordinary accesses of shared memory and those of TMA or wgmma, in the thread that made the former;
// and the same for global memory, which waits until the whole GPU sees them.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void stmatrix_x4(std::uint32_t shared, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// A number in global memory that thread blocks hand on: what one wrote before it set the number, the next sees.
__device__ inline unsigned load_acquire(const unsigned* global) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}
__device__ inline void store_release(unsigned* global, unsigned x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

// Registers of a thread, for all warps of a warpgroup at once.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Before the first wgmma, and after registers that it reads have been written.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The values of x are there, and the compiler neither moves what makes them behind this place nor their use before it.
template <int kN>
__device__ __forceinline__ void warpgroup_fence_operand(float (&x)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    asm volatile("" : "+f"(x[i])::"memory");
  }
}

// d[64, N] (+)= a[64, 16] b[16, N] of a warpgroup, N = 2 * elements of d, sums in fp32. a is in registers, b the
// descriptor of a tile in shared memory whose rows lie along k or along N.
enum class Major : std::uint8_t { k, mn };

#define DISTR_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DISTR_F16(d, i) DISTR_F4(d, i), DISTR_F4(d, i + 4), DISTR_F4(d, i + 8), DISTR_F4(d, i + 12)

template <Major kMajor>
__device__ inline void wgmma(float (&d)[16], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __half) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}"
      : DISTR_F16(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kMajor == Major::mn));
}

template <Major kMajor>
__device__ inline void wgmma(float (&d)[16], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __nv_bfloat16) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}"
      : DISTR_F16(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kMajor == Major::mn));
}

template <Major kMajor>
__device__ inline void wgmma(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __half) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : DISTR_F16(d, 0), DISTR_F16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kMajor == Major::mn));
}

template <Major kMajor>
__device__ inline void wgmma(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __nv_bfloat16) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : DISTR_F16(d, 0), DISTR_F16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kMajor == Major::mn));
}

template <Major kMajor>
__device__ inline void wgmma(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __half) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : DISTR_F16(d, 0), DISTR_F16(d, 16), DISTR_F16(d, 32), DISTR_F16(d, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kMajor == Major::mn));
}

template <Major kMajor>
__device__ inline void wgmma(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b, bool add, __nv_bfloat16) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : DISTR_F16(d, 0), DISTR_F16(d, 16), DISTR_F16(d, 32), DISTR_F16(d, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kMajor == Major::mn));
}

// The same with a, too, in shared memory, whose rows lie along k or along the 64 rows of d.
template <Major kMajorA, Major kMajorB>
__device__ inline void wgmma(float (&d)[8], std::uint64_t a, std::uint64_t b, bool add, __half) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, p, 1, 1, %11, %12;\n}"
      : DISTR_F4(d, 0), DISTR_F4(d, 4)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

template <Major kMajorA, Major kMajorB>
__device__ inline void wgmma(float (&d)[8], std::uint64_t a, std::uint64_t b, bool add, __nv_bfloat16) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, p, 1, 1, %11, %12;\n}"
      : DISTR_F4(d, 0), DISTR_F4(d, 4)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

template <Major kMajorA, Major kMajorB>
__device__ inline void wgmma(float (&d)[16], std::uint64_t a, std::uint64_t b, bool add, __half) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, %19, %20;\n}"
      : DISTR_F16(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

template <Major kMajorA, Major kMajorB>
__device__ inline void wgmma(float (&d)[16], std::uint64_t a, std::uint64_t b, bool add, __nv_bfloat16) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, %19, %20;\n}"
      : DISTR_F16(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

template <Major kMajorA, Major kMajorB>
__device__ inline void wgmma(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add, __half) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, %35, %36;\n}"
      : DISTR_F16(d, 0), DISTR_F16(d, 16)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

template <Major kMajorA, Major kMajorB>
__device__ inline void wgmma(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add, __nv_bfloat16) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, %35, %36;\n}"
      : DISTR_F16(d, 0), DISTR_F16(d, 16)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

template <Major kMajorA, Major kMajorB>
__device__ inline void wgmma(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add, __half) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, %67, %68;\n}"
      : DISTR_F16(d, 0), DISTR_F16(d, 16), DISTR_F16(d, 32), DISTR_F16(d, 48)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

template <Major kMajorA, Major kMajorB>
__device__ inline void wgmma(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add, __nv_bfloat16) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, %67, %68;\n}"
      : DISTR_F16(d, 0), DISTR_F16(d, 16), DISTR_F16(d, 32), DISTR_F16(d, 48)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

#undef DISTR_F16
#undef DISTR_F4

}  // namespace distr::cuda::ptx
