// SPDX-License-Identifier: Apache-2.0
// Values made and compared on the device (device_values.h). Two kernels that stride over their elements by the whole
// grid, one element a thread and step:
//   fill: two rounds of a mixing hash of (seed, index), then Box-Muller;
//   difference: sums of squares in double, by warp and then by atomics, hence not the same bits in every run.
// They measure nothing that is published but the error of O.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "cuda/launch.h"
#include "gpu/device_values.h"

namespace distr::test {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kBlocks = 2048;

__device__ std::uint64_t mix(std::uint64_t x) {  // the finalizer of SplitMix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

__device__ void put(float* to, float x) { *to = x; }
__device__ void put(__half* to, float x) { *to = __float2half_rn(x); }
__device__ void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ float get(float x) { return x; }
__device__ float get(__half x) { return __half2float(x); }
__device__ float get(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ std::int64_t first_index() { return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ std::int64_t step() { return static_cast<std::int64_t>(gridDim.x) * kThreads; }

template <class T>
__global__ void fill_kernel(T* data, std::int64_t count, std::uint64_t seed) {
  for (std::int64_t n = first_index(); n < count; n += step()) {
    const std::uint64_t bits = mix(mix(seed) + static_cast<std::uint64_t>(n));
    const float u = (static_cast<float>(bits >> 40) + 0.5F) * 0x1p-24F;
    const float angle = static_cast<float>(bits & 0xFFFFFFU) * (2 * 3.14159265F * 0x1p-24F);
    put(data + n, sqrtf(-2 * logf(u)) * cosf(angle));
  }
}

template <class T>
__global__ void difference_kernel(const T* a, const T* b, std::int64_t count, double* sums) {
  double difference = 0;
  double size = 0;
  for (std::int64_t n = first_index(); n < count; n += step()) {
    const double x = get(a[n]);
    const double y = get(b[n]);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  for (int lane = 16; lane > 0; lane /= 2) {
    difference += __shfl_down_sync(0xFFFFFFFFU, difference, lane);
    size += __shfl_down_sync(0xFFFFFFFFU, size, lane);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(sums, difference);
    atomicAdd(sums + 1, size);
  }
}

template <class Function>
void with_element(DType dtype, const Function& function) {
  if (dtype == DType::f16) {
    function(__half{});
  } else if (dtype == DType::bf16) {
    function(__nv_bfloat16{});
  } else {
    function(float{});
  }
}

}  // namespace

void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed, void* stream) {
  with_element(dtype, [&]<class T>(T) {
    cuda::launch(fill_kernel<T>, dim3(kBlocks), kThreads, 0, stream, static_cast<T*>(data), count, seed);
  });
}

double relative_difference(const void* a, const void* b, DType dtype, std::int64_t count, void* stream) {
  double* sums = nullptr;
  double host[2] = {};
  auto* const on = static_cast<cudaStream_t>(stream);
  cuda::check(cudaMalloc(reinterpret_cast<void**>(&sums), sizeof(host)), "cudaMalloc");
  cuda::check(cudaMemsetAsync(sums, 0, sizeof(host), on), "cudaMemsetAsync");
  with_element(dtype, [&]<class T>(T) {
    cuda::launch(difference_kernel<T>, dim3(kBlocks), kThreads, 0, stream, static_cast<const T*>(a),
                 static_cast<const T*>(b), count, sums);
  });
  cuda::check(cudaMemcpyAsync(host, sums, sizeof(host), cudaMemcpyDeviceToHost, on), "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(on), "cudaStreamSynchronize");
  cuda::check(cudaFree(sums), "cudaFree");
  return std::sqrt(host[0] / host[1]);
}

}  // namespace distr::test
