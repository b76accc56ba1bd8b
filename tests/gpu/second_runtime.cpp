// SPDX-License-Identifier: Apache-2.0
// Stands before CUDA's runtime (LD_PRELOAD) where two GPUs are wanted and the machine has one: device 1 is device 0
// with a context of its own. The driver lets contexts of one GPU share memory and streams: here the other device's
// streams are refused, and memory is said to be on the device that it would be on. For PyTorch, and operators that
// share its runtime as ours do when linked so (CMakeLists.txt).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int kSecond = 1;
constexpr cudaError_t kRefused = cudaErrorInvalidResourceHandle;  // what a stream of another GPU gives

void* dlsym_of_libc(void* library, const char* name) {
  static const auto find = reinterpret_cast<decltype(&dlsym)>(dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34"));
  return find(library, name);
}

[[noreturn]] void give_up(const char* what) {
  std::fprintf(stderr, "second_runtime: %s\n", what);
  std::abort();
}

template <class F>
F* real(const char* library, const char* name) {
  void* const opened = dlopen(library, RTLD_LAZY);
  void* const found = opened != nullptr ? dlsym_of_libc(opened, name) : nullptr;
  if (found == nullptr) {
    give_up(name);
  }
  return reinterpret_cast<F*>(found);
}

constexpr const char* kDriver = "libcuda.so.1";
// What stands behind the function of this name here, by the name that the headers give it (their names are macros).
#define NAME_OF(function) #function
#define DRIVER(function) real<decltype(function)>(kDriver, NAME_OF(function))
#define RUNTIME(function) real<decltype(function)>(kRuntime.c_str(), NAME_OF(function))
const std::string kRuntime = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);

CUcontext current_context() {
  CUcontext current = nullptr;
  DRIVER(cuCtxGetCurrent)(&current);
  return current;
}

// The second device's context, made at the first call and never destroyed.
CUcontext second_context() {
  static const CUcontext context = [] {
    CUcontext made = nullptr;
    const CUcontext before = current_context();
    const auto create = real<CUresult(CUcontext*, unsigned, CUdevice)>(kDriver, "cuCtxCreate_v2");
    if (create(&made, 0, 0) != CUDA_SUCCESS || DRIVER(cuCtxSetCurrent)(before) != CUDA_SUCCESS) {
      give_up("no second context");
    }
    return made;
  }();
  return context;
}

bool is_second(CUcontext context) { return context != nullptr && context == second_context(); }

bool is_of_another_device(cudaStream_t stream) {
  CUcontext owner = nullptr;
  return stream != nullptr && (DRIVER(cuStreamGetCtx)(stream, &owner) != CUDA_SUCCESS || owner != current_context());
}

int of_first(int device) { return device == kSecond ? 0 : device; }

int count_by_nvml(unsigned* count) {
  *count = 2;
  return 0;
}

CUresult has_context(CUdevice device, unsigned* flags, int* active) {
  return DRIVER(cuDevicePrimaryCtxGetState)(of_first(device), flags, active);
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (is_second(current_context())) {
    *device = kSecond;
    return cudaSuccess;
  }
  return RUNTIME(cudaGetDevice)(device);
}

cudaError_t cudaSetDevice(int device) {
  const cudaError_t error = RUNTIME(cudaSetDevice)(of_first(device));  // initialises the driver, too
  if (error == cudaSuccess && device == kSecond) {
    return DRIVER(cuCtxSetCurrent)(second_context()) == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
  }
  return error;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return RUNTIME(cudaGetDeviceProperties)(properties, of_first(device));
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return RUNTIME(cudaDeviceGetAttribute)(value, attribute, of_first(device));
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  return RUNTIME(cudaDeviceGetPCIBusId)(id, length, of_first(device));
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int /*device*/, int /*peer*/) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const cudaError_t error = RUNTIME(cudaPointerGetAttributes)(attributes, pointer);
  CUcontext owner = nullptr;
  DRIVER(cuPointerGetAttribute)(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, reinterpret_cast<CUdeviceptr>(pointer));
  if (error == cudaSuccess && attributes->type == cudaMemoryTypeDevice && is_second(owner)) {
    attributes->device = kSecond;
  }
  return error;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  return is_of_another_device(stream) ? kRefused : RUNTIME(cudaMemsetAsync)(data, value, bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  return is_of_another_device(config->stream) ? kRefused : RUNTIME(cudaLaunchKernelExC)(config, kernel, arguments);
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 threads, void** arguments, std::size_t shared,
                             cudaStream_t stream) {
  return is_of_another_device(stream) ? kRefused
                                      : RUNTIME(cudaLaunchKernel)(kernel, grid, threads, arguments, shared, stream);
}

// What <<<>>> calls from CUDA 13 on.
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments, std::size_t shared,
                               cudaStream_t stream) {
  return is_of_another_device(stream) ? kRefused
                                      : RUNTIME(__cudaLaunchKernel)(kernel, grid, threads, arguments, shared, stream);
}

// PyTorch asks the driver itself whether a device has a context, and sets none that has not; and it counts by NVML.
void* dlsym(void* library, const char* name) noexcept {
  if (std::strcmp(name, "cuDevicePrimaryCtxGetState") == 0) {
    return reinterpret_cast<void*>(has_context);
  }
  if (std::strcmp(name, "nvmlDeviceGetCount_v2") == 0) {
    return reinterpret_cast<void*>(count_by_nvml);
  }
  return dlsym_of_libc(library, name);
}

}  // extern "C"
