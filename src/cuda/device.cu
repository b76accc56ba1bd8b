// SPDX-License-Identifier: Apache-2.0
// What the machine has: every question is answered in words where there is no driver or no device.
#include <array>
#include <atomic>
#include <map>
#include <mutex>

#include "cuda/capability.h"
#include "cuda/compiled_for.h"
#include "cuda/launch.h"
#include "kernel.h"

namespace distr {
namespace cuda {
namespace {

constexpr int kOldest = 8;  // sm_80: cp.async, bf16

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

// The number of devices; 0 with a reason.
int count_devices(std::string& reason) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) {
    return count;
  }
  cudaGetLastError();
  int driver = 0;
  int runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || cudaRuntimeGetVersion(&runtime) != cudaSuccess || driver == 0) {
    reason = "this machine has no NVIDIA driver";
  } else if (status == cudaErrorInsufficientDriver) {
    reason = "the NVIDIA driver serves CUDA " + version(driver) + ", and this build needs " + version(runtime);
  } else if (status == cudaSuccess || status == cudaErrorNoDevice) {
    reason = "the NVIDIA driver finds no device";
  } else {
    reason = std::string("the NVIDIA driver fails: ") + cudaGetErrorString(status);
  }
  return 0;
}

std::string name_of(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return properties.name;
}

bool is_served(int major, int minor) { return major >= kOldest && runs_on(major * 10 + minor, kMachineCode, kPtx); }

std::string unserved_reason(int device) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (is_served(major, minor)) {
    return "";
  }
  const std::string has = "device " + std::to_string(device) + " (" + name_of(device) + ") has compute capability " +
                          std::to_string(major) + "." + std::to_string(minor);
  if (major < kOldest) {
    return has + "; allowed: " + std::to_string(kOldest) + ".0 and above";
  }
  return has + ", for which this build has no kernels; build it with DISTR_CUDA_ARCHITECTURES=" +
         std::to_string(major * 10 + minor);
}

}  // namespace

const DeviceProperties& device_properties() {
  constexpr std::size_t kCachedDevices = 64;  // no lock is taken for these once they are known
  static std::array<std::atomic<const DeviceProperties*>, kCachedDevices> cached{};
  static std::mutex mutex;
  static std::map<int, DeviceProperties> known;  // by device; its elements stay where they are
  const int device = current_device();
  const auto index = static_cast<std::size_t>(device);
  if (index < kCachedDevices) {
    if (const DeviceProperties* found = cached[index].load(std::memory_order_acquire)) {
      return *found;
    }
  }
  const std::lock_guard lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) {
    DeviceProperties properties;
    properties.major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    properties.minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
    properties.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
    properties.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    properties.shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    found = known.emplace(device, properties).first;
  }
  if (index < kCachedDevices) {
    cached[index].store(&found->second, std::memory_order_release);
  }
  return found->second;
}

void require_device_memory(const void* pointer, const char* name, int device) {
  if (pointer == nullptr) {
    return;
  }
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeUnregistered) {
    throw Error(Status::invalid_argument, std::string(name) + " is in host memory; allowed: memory of the CUDA device");
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
    throw Error(Status::invalid_argument, std::string(name) + " is in the memory of device " +
                                              std::to_string(attributes.device) + "; allowed: the current device, " +
                                              std::to_string(device));
  }
}

std::string unusable_reason() {
  try {
    const DeviceProperties& properties = device_properties();  // known after the first call, unlike what follows
    if (is_served(properties.major, properties.minor)) {
      return {};
    }
  } catch (const Error&) {
    // There may be no device, which is said better below.
  }
  std::string reason;
  if (count_devices(reason) == 0) {
    return reason;
  }
  try {
    return unserved_reason(current_device());
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace cuda

std::vector<std::string> cuda_device_names(std::string& reason) {
  std::vector<std::string> names;
  const int count = cuda::count_devices(reason);
  try {
    for (int device = 0; device < count; ++device) {
      const std::string unsupported_reason = cuda::unserved_reason(device);
      if (unsupported_reason.empty()) {
        names.push_back(cuda::name_of(device));
      } else {
        reason = unsupported_reason;
      }
    }
  } catch (const Error& error) {
    reason = error.what();
  }
  return names;
}

}  // namespace distr
