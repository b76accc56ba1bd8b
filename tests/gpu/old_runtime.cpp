// SPDX-License-Identifier: Apache-2.0
// Stands between the library and CUDA's runtime in the tests of machines that cannot serve: one device, of before
// sm_80. (A driver of ours cannot show one: the runtime wants more of a driver that has devices.)
#include <cuda_runtime.h>

#include <cstring>

// The names are the linker's: __wrap_x stands for x.
extern "C" {

cudaError_t __wrap_cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t __wrap_cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 7 : 5;
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "Tesla T4");
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetDeviceProperties_v2(cudaDeviceProp* properties, int device) {  // its name before CUDA 13
  return __wrap_cudaGetDeviceProperties(properties, device);
}

}  // extern "C"
