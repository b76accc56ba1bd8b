// SPDX-License-Identifier: Apache-2.0
// Device memory, copies and events for programs without CUDA's headers.
#include <string>

#include "cuda/launch.h"
#include "distr/device.h"

namespace distr {
namespace cuda {
namespace {

void require_usable() {
  const std::string reason = unusable_reason();
  if (!reason.empty()) {
    throw Error(Status::unsupported, "CUDA cannot be used: " + reason);
  }
}

std::string device_name() {
  int device = 0;
  cudaDeviceProp properties{};
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return properties.name;
}

void require_within(std::size_t bytes, std::size_t all) {
  if (bytes > all) {
    throw Error(Status::invalid_argument,
                std::to_string(bytes) + " bytes are to be copied; allowed: up to " + std::to_string(all));
  }
}

}  // namespace
}  // namespace cuda

inline namespace v0 {

using cuda::check;

std::string cuda_unusable_reason() { return cuda::unusable_reason(); }

CudaDevice cuda_device() {
  cuda::require_usable();
  const cuda::DeviceProperties& properties = cuda::device_properties();
  int device = 0;
  int cache = 0;
  int runtime = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  CudaDevice result;
  result.name = cuda::device_name();
  result.major = properties.major;
  result.minor = properties.minor;
  result.processors = properties.num_sms;
  result.shared_memory = properties.shared_bytes_per_sm;
  result.cache = cache;
  check(cudaMemGetInfo(&result.free_memory, &result.memory), "cudaMemGetInfo");
  result.runtime = std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10);
  return result;
}

CudaMemory::CudaMemory(std::size_t bytes) : bytes_(bytes > 0 ? bytes : 1) {
  cuda::require_usable();
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes_);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t free = 0;
    std::size_t all = 0;
    check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    throw Error(Status::out_of_memory, "out of CUDA memory: " + std::to_string(bytes_) + " bytes were asked for, and " +
                                           std::to_string(free) + " of the " + std::to_string(all) + " of " +
                                           cuda::device_name() + " are free");
  }
  check(status, "cudaMalloc");
  data_.reset(data);
}

void CudaMemory::Free::operator()(void* data) const noexcept { cudaFree(data); }

void CudaMemory::copy_from(const void* host, std::size_t bytes, void* stream) {
  cuda::require_within(bytes, this->bytes());
  const auto on = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(data(), host, bytes, cudaMemcpyHostToDevice, on), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(on), "cudaStreamSynchronize");
}

void CudaMemory::copy_to(void* host, std::size_t bytes, void* stream) const {
  cuda::require_within(bytes, this->bytes());
  const auto on = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(host, data(), bytes, cudaMemcpyDeviceToHost, on), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(on), "cudaStreamSynchronize");
}

void CudaMemory::fill(std::uint8_t value, void* stream) {
  check(cudaMemsetAsync(data(), value, bytes(), static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

CudaStopwatch::~CudaStopwatch() {
  for (void* event : events_) {
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
}

void CudaStopwatch::mark() {
  if (marks_ == events_.size()) {
    cuda::require_usable();
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate");
    events_.push_back(event);
  }
  check(cudaEventRecord(static_cast<cudaEvent_t>(events_[marks_]), static_cast<cudaStream_t>(stream_)),
        "cudaEventRecord");
  ++marks_;
}

std::vector<double> CudaStopwatch::laps() {
  std::vector<double> result;
  for (std::size_t n = 0; n + 1 < marks_; ++n) {
    const auto begin = static_cast<cudaEvent_t>(events_[n]);
    const auto end = static_cast<cudaEvent_t>(events_[n + 1]);
    float milliseconds = 0;
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    result.push_back(static_cast<double>(milliseconds));
  }
  marks_ = 0;
  return result;
}

}  // namespace v0
}  // namespace distr
