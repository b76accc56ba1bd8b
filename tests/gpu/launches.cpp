// SPDX-License-Identifier: Apache-2.0
#include "gpu/launches.h"

#include <cuda_runtime.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
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

cudaDeviceProp device_properties() {
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return properties;
}

// The mangled names of the kernels in this program. Objects register them before main().
std::set<std::string>& kernels() {
  static std::set<std::string> names;
  return names;
}

std::string name_of(const void* kernel) {
  const char* name = nullptr;
  require(cudaFuncGetName(&name, kernel), "cudaFuncGetName");
  return name;
}

std::string readable(const std::string& name) {
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr),
                                                         &std::free);
  return text ? text.get() : name;
}

// A part of the names of kernels that are there to be timed: ablations, which are in namespace distr::test.
constexpr const char* kTimedAlone = "4test";

// Hopper's kernels, and q_hat for them, run on Hopper alone.
bool runs_on(int major, const std::string& name) {
  return major == 9 || (name.find("4sm90") == std::string::npos && name.find("15estimate_kernel") == std::string::npos);
}

}  // namespace

// The names are the linker's: __wrap_x stands for x, __real_x is what x was.
extern "C" {

void __real___cudaRegisterFunction(void** binary, const char* stub, char* name, const char* device_name, int limit,
                                   uint3* thread, uint3* block, dim3* threads, dim3* grid, int* warp_size);
void __wrap___cudaRegisterFunction(void** binary, const char* stub, char* name, const char* device_name, int limit,
                                   uint3* thread, uint3* block, dim3* threads, dim3* grid, int* warp_size) {
  kernels().insert(device_name);
  __real___cudaRegisterFunction(binary, stub, name, device_name, limit, thread, block, threads, grid, warp_size);
}

cudaError_t __real___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments,
                                      std::size_t shared, cudaStream_t stream);
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments,
                                      std::size_t shared, cudaStream_t stream) {
  remember(kernel, threads, shared);
  return __real___cudaLaunchKernel(kernel, grid, threads, arguments, shared, stream);
}

cudaError_t __real_cudaLaunchKernel(const void* kernel, dim3 grid, dim3 threads, void** arguments, std::size_t shared,
                                    cudaStream_t stream);
cudaError_t __wrap_cudaLaunchKernel(const void* kernel, dim3 grid, dim3 threads, void** arguments, std::size_t shared,
                                    cudaStream_t stream) {
  remember(kernel, threads, shared);
  return __real_cudaLaunchKernel(kernel, grid, threads, arguments, shared, stream);
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
    cudaFuncAttributes attributes{};
    int blocks = 0;
    require(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads), shared),
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    launches.push_back({{"kernel", name_of(kernel)},
                        {"threads", threads},
                        {"dynamic_shared_bytes", shared},
                        {"registers", attributes.numRegs},
                        {"static_shared_bytes", attributes.sharedSizeBytes},
                        {"local_bytes", attributes.localSizeBytes},
                        {"blocks_per_sm", blocks}});
  }
  const cudaDeviceProp properties = device_properties();
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

std::vector<std::string> never_launched() {
  const int major = device_properties().major;
  std::set<std::string> left;
  const std::lock_guard lock(mutex);
  for (const std::string& name : kernels()) {
    if (runs_on(major, name) && name.find(kTimedAlone) == std::string::npos) {
      left.insert(name);
    }
  }
  for (const Launch& launch : seen) {
    left.erase(name_of(std::get<0>(launch)));
  }
  std::vector<std::string> result;
  std::transform(left.begin(), left.end(), std::back_inserter(result), readable);
  return result;
}

}  // namespace distr::test
