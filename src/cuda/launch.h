// SPDX-License-Identifier: Apache-2.0
// Checked calls of the CUDA runtime, and what the kernels must know of the device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
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

// Why no kernel of this build can run on the current device (no driver, older than sm_80); empty: they can.
std::string unusable_reason();

// Lets the kernel have so many bytes of dynamic shared memory on the current device. CUDA is asked once for each
// device.
void allow_shared_memory(const void* kernel, std::size_t bytes);

// Lets the kernel have so many bytes of dynamic shared memory, if more than kernels have without asking.
template <class... Parameters>
void raise_shared_memory_limit(void (*kernel)(Parameters...), std::size_t shared) {
  constexpr std::size_t kDefaultSharedBytes = 48 * 1024;
  if (shared > kDefaultSharedBytes) {
    allow_shared_memory(reinterpret_cast<const void*>(kernel), shared);
  }
}

// Launches on `stream` with `shared` bytes of dynamic shared memory; the kernel's limit is raised where it must be.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, void* stream,
            const Arguments&... arguments) {
  raise_shared_memory_limit(kernel, shared);
  launch_kernel(kernel, grid, threads, shared, stream, arguments...);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace distr::cuda
