// SPDX-License-Identifier: Apache-2.0
// Checked calls of the CUDA runtime, and what the kernels must know of the device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/launch_syntax.h"
#include "distr/error.h"

namespace distr::cuda {

// Throws Error(out_of_memory) or Error(device_failure) that names the call and CUDA's own words.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) {
    return;
  }
  cudaGetLastError();  // a call that failed must not fail the next one
  throw Error(status == cudaErrorMemoryAllocation ? Status::out_of_memory : Status::device_failure,
              std::string(call) + ": " + cudaGetErrorString(status));
}

[[nodiscard]] inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

struct DeviceProperties {
  int major = 0, minor = 0;     // compute capability
  int num_sms = 0;              // SMs
  int shared_bytes = 0;         // the most a block may have
  int shared_bytes_per_sm = 0;  // of an SM
};

// Of the current device. CUDA is asked once for each device. Throws Error(device_failure) if there is none.
const DeviceProperties& device_properties();

// How many thread blocks of so much shared memory fit into one of its SMs.
[[nodiscard]] inline std::int64_t fitting_ctas(std::int64_t shared_bytes) {
  constexpr std::int64_t kReservedBytes = 1024;  // by the system, for every block
  return device_properties().shared_bytes_per_sm / (shared_bytes + kReservedBytes);
}

// Why no kernel of this build can run on the current device (no driver, older than sm_80); empty: they can.
std::string unusable_reason();

// Throws Error(invalid_argument) where memory is not that of the current device, `device`: it would fail in the kernel,
// long after the call. Null is none.
void require_device_memory(const void* pointer, const char* name, int device);

// Lets a kernel have kBytes of dynamic shared memory on the current device. CUDA is asked once for each device (if it
// is one of the first 64), and no lock is taken: where two threads ask at once they ask for the same.
template <auto kKernel, std::size_t kBytes>
void allow_shared_memory() {
  constexpr std::size_t kDefaultBytes = 48 * 1024;  // that every kernel may have
  if constexpr (kBytes > kDefaultBytes) {
    static std::atomic<std::uint64_t> allowed = 0;  // devices, a bit each
    const int device = current_device();
    const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
    if ((allowed.load(std::memory_order_acquire) & bit) == 0) {
      check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(kBytes)),
            "cudaFuncSetAttribute");
      allowed.fetch_or(bit, std::memory_order_release);
    }
  }
}

// Launches on `stream` with `shared` bytes of dynamic shared memory: up to 48 KiB, or what allow_shared_memory()
// allowed.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, void* stream,
            const Arguments&... arguments) {
  launch_kernel(kernel, grid, threads, shared, stream, arguments...);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace distr::cuda
