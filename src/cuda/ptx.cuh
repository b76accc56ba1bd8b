// SPDX-License-Identifier: Apache-2.0
// Wrappers of PTX instructions, one for each function. This file and sm90/ptx.cuh have the only inline assembly of the
// CUDA sources.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace distr::cuda::ptx {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory, bypassing L1. Where `valid` is false it reads nothing and writes zeros.
__device__ inline void cp_async_16(std::uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// The same where `issues` is true, else nothing.
__device__ inline void cp_async_16_if(bool issues, std::uint32_t shared, const void* global) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared),
               "l"(global), "r"(static_cast<int>(issues))
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's committed groups are under way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline void store_shared_4(std::uint32_t shared, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

__device__ inline std::uint32_t load_shared_4(std::uint32_t shared) {
  std::uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

__device__ inline void store_shared_8(std::uint32_t shared, uint2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(x.x), "r"(x.y) : "memory");
}

__device__ inline uint2 load_shared_8(std::uint32_t shared) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(shared) : "memory");
  return x;
}

__device__ inline void store_shared_16(std::uint32_t shared, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ inline uint4 load_shared_16(std::uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

// A barrier of some of a block's warps, and to arrive there without waiting; id 0 is __syncthreads().
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Whether one of the threads that meet at a named barrier holds something.
__device__ inline bool named_barrier_or(int id, int threads, bool holds) {
  unsigned any;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nbarrier.cta.red.or.pred.aligned p, %1, %2, p;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<unsigned>(holds))
      : "memory");
  return any != 0;
}

// How many of the threads that meet at a named barrier hold something.
__device__ inline unsigned named_barrier_count(int id, int threads, bool holds) {
  unsigned count;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nbarrier.cta.red.popc.aligned.u32 %0, %1, %2, p;\n}"
               : "=r"(count)
               : "r"(id), "r"(threads), "r"(static_cast<unsigned>(holds))
               : "memory");
  return count;
}

// The larger one; NaN where one is.
__device__ inline float max_nan(float x, float y) {
  float max;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(x), "f"(y));
  return max;
}

// The bits of a number: of numbers above 0 they are in order, of others they are below these. NaN is above all where it
// has no sign, as that of wgmma has none (tests/python/test_cuda.py).
__device__ inline int ordered_bits(float x) { return __float_as_int(x); }
__device__ inline int max3(int x, int y, int z) { return __vimax3_s32(x, y, z); }

// Adds to fp32 in global memory, which other threads add to at the same time; nothing comes back.
__device__ inline void red_add(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Four in a row, from a multiple of 16 bytes on.
__device__ inline void red_add_4(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// The same, each matrix transposed.
__device__ inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// d[16, 8] += a[16, 16] b[16, 8], sums in fp32.
__device__ inline void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                   __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                   __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x, in a way that the compiler cannot see: what is computed from it is computed again rather than kept in registers.
__device__ inline unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ inline float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

template <class T>
__device__ inline T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// 2^x; subnormal results are zero. The compiler may move it, also behind a wait for wgmma that it does not need.
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within an ulp; subnormal results are zero.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x within low .. high; NaN stays.
__device__ inline float clamp(float x, float low, float high) {
  float y;
  asm("{\n.reg .f32 t;\nmax.NaN.f32 t, %1, %2;\nmin.NaN.f32 %0, t, %3;\n}" : "=f"(y) : "f"(x), "f"(low), "f"(high));
  return y;
}

// Two fp32 rounded to 16 bits, `low` in the low half.
__device__ inline std::uint32_t pack(float low, float high, __half) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline std::uint32_t pack(float low, float high, __nv_bfloat16) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace distr::cuda::ptx
