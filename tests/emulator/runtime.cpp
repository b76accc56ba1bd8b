// SPDX-License-Identifier: Apache-2.0
#include "emulator/runtime.h"

#include <cuda.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "emulator/copies.h"
#include "emulator/dynamic_arrays.h"

namespace {

constexpr int kProcessors = 132;

using Work = std::vector<std::function<void()>>;

struct Stream {
  bool captures = false;
  Work captured;
};

std::mutex memory_mutex;
std::map<const std::byte*, std::size_t> memory;  // what cudaMalloc gave
thread_local Stream default_stream;
// Streams of this thread that capture, and whether something was put on the default stream meanwhile, which CUDA
// refuses.
thread_local int capturing = 0;
thread_local bool is_invalid = false;

Stream& stream_of(cudaStream_t stream) {
  return stream == nullptr ? default_stream : *reinterpret_cast<Stream*>(stream);
}

int number(const char* name, int absent) {
  const char* const text = std::getenv(name);
  return text == nullptr ? absent : std::atoi(text);
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill) {
  using distr::emulator::TensorMap;
  static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
  TensorMap made{};
  made.magic = distr::emulator::kTensorMapMagic;
  made.base = static_cast<std::byte*>(base);
  made.rank = rank;
  made.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  made.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                 : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                        : 0;
  constexpr std::uint64_t kMaxStride = std::uint64_t{1} << 40;
  bool valid = rank >= 1 && rank <= 5 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
               reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && box[0] * made.element % 16 == 0 &&
               (made.swizzle == 0 || box[0] * made.element <= made.swizzle);
  for (cuuint32_t axis = 0; valid && axis < rank; ++axis) {
    made.sizes[axis] = sizes[axis];
    made.strides[axis] = axis == 0 ? made.element : strides[axis - 1];
    made.box[axis] = box[axis];
    valid = sizes[axis] >= 1 && sizes[axis] <= std::uint64_t{1} << 32 && box[axis] >= 1 && box[axis] <= 256 &&
            steps[axis] == 1 && (axis == 0 || (made.strides[axis] % 16 == 0 && made.strides[axis] < kMaxStride));
  }
  if (!valid) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

}  // namespace

namespace distr::emulator {

void enqueue(cudaStream_t stream, std::function<void()> work) {
  Stream& on = stream_of(stream);
  is_invalid |= stream == nullptr && capturing > 0;
  if (on.captures) {
    on.captured.push_back(std::move(work));
  } else {
    work();
  }
}

}  // namespace distr::emulator

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int /*device*/, int /*other*/) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int /*other*/, unsigned /*flags*/) { return cudaErrorInvalidDevice; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = number("DISTR_EMULATED_SMS", kProcessors);
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 * 1024;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = {};
  std::strcpy(properties->name, "emulated sm_90");
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* /*kernel*/, cudaFuncAttribute /*attribute*/, int value) {
  return value <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMalloc(void** to, std::size_t bytes) {
  *to = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  const std::lock_guard lock(memory_mutex);
  memory[static_cast<std::byte*>(*to)] = bytes;
  return *to == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* from) {
  const std::lock_guard lock(memory_mutex);
  memory.erase(static_cast<std::byte*>(from));
  std::free(from);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* all) {
  *free = *all = std::size_t{8} << 30;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  const auto* const byte = static_cast<const std::byte*>(pointer);
  const std::lock_guard lock(memory_mutex);
  auto found = memory.upper_bound(byte);
  if (found != memory.begin() && (--found, byte <= found->first + found->second)) {
    attributes->type = cudaMemoryTypeDevice;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  distr::emulator::enqueue(
      stream, [=] { std::copy_n(static_cast<const std::byte*>(from), bytes, static_cast<std::byte*>(to)); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  distr::emulator::enqueue(stream,
                           [=] { std::fill_n(static_cast<std::byte*>(to), bytes, static_cast<std::byte>(value)); });
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
  for (std::size_t row = 0; row < rows; ++row) {
    cudaMemcpyAsync(static_cast<std::byte*>(to) + row * to_pitch,
                    static_cast<const std::byte*>(from) + row * from_pitch, width, kind, stream);
  }
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* /*memory*/, std::size_t /*bytes*/, unsigned /*flags*/) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void* /*memory*/) { return cudaSuccess; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<Stream*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t /*stream*/, cudaEvent_t /*event*/, unsigned /*flags*/) {
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  stream_of(stream).captures = true;
  ++capturing;
  is_invalid = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream& on = stream_of(stream);
  on.captures = false;
  *graph = reinterpret_cast<cudaGraph_t>(new Work(std::move(on.captured)));
  on.captured.clear();
  --capturing;
  return is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long /*flags*/) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Work(*reinterpret_cast<Work*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t /*stream*/) {
  for (const auto& work : *reinterpret_cast<Work*>(executable)) {
    work();
  }
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Work*>(executable);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Work*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* /*name*/, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/, cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&encode);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t /*event*/) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t /*event*/, cudaStream_t /*stream*/) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t /*event*/) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t /*begin*/, cudaEvent_t /*end*/) {
  *milliseconds = 0;
  return cudaSuccess;
}

}  // extern "C"
