// SPDX-License-Identifier: Apache-2.0
#include "gpu/launches.h"

#include <cuda_runtime.h>

#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <tuple>

namespace {

using Launch = std::tuple<const void*, unsigned, std::size_t>;  // kernel, threads, bytes of dynamic shared memory

std::mutex mutex;
std::set<Launch> seen;

void remember(const void* kernel, dim3 threads, std::size_t shared) {
  const std::lock_guard lock(mutex);
  seen.emplace(kernel, threads.x * threads.y * threads.z, shared);
}

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

}  // namespace

// The names are the linker's: __wrap_x stands for x, __real_x is what x was.
extern "C" {

cudaError_t __real___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments,
                                      std::size_t shared, cudaStream_t stream);
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments,
                                      std::size_t shared, cudaStream_t stream) {
  remember(kernel, threads, shared);
  return __real___cudaLaunchKernel(kernel, grid, threads, arguments, shared, stream);
}

cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  remember(kernel, config->blockDim, config->dynamicSmemBytes);
  return __real_cudaLaunchKernelExC(config, kernel, arguments);
}

}  // extern "C"

namespace distr::test {

void write_launches(const std::string& path) {
  nlohmann::ordered_json launches = nlohmann::ordered_json::array();
  const std::lock_guard lock(mutex);
  for (const auto& [kernel, threads, shared] : seen) {
    const char* name = nullptr;
    cudaFuncAttributes attributes{};
    int blocks = 0;
    require(cudaFuncGetName(&name, kernel), "cudaFuncGetName");
    require(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads), shared),
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    launches.push_back({{"kernel", name},
                        {"threads", threads},
                        {"dynamic_shared_bytes", shared},
                        {"registers", attributes.numRegs},
                        {"static_shared_bytes", attributes.sharedSizeBytes},
                        {"local_bytes", attributes.localSizeBytes},
                        {"blocks_per_sm", blocks}});
  }
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::ofstream file(path);
  file << nlohmann::ordered_json{{"gpu", properties.name},
                                 {"target",
                                  "sm_" + std::to_string(properties.major) + std::to_string(properties.minor)},
                                 {"launches", launches}}
              .dump(1)
       << "\n";
  if (!file) {
    throw std::runtime_error("cannot write " + path);
  }
}

}  // namespace distr::test
