// SPDX-License-Identifier: Apache-2.0
// Devices, streams, events and pinned memory for programs without CUDA's headers.
#include <string>

#include "cuda/launch.h"
#include "distr/device.h"

namespace distr {
inline namespace v0 {

using cuda::check;

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

namespace {

void require_device(int device) {
  const int count = cuda_device_count();
  if (device < 0 || device >= count) {
    const std::string allowed = count == 0 ? "none: " + cuda_unusable_reason() : "0 to " + std::to_string(count - 1);
    throw Error(Status::invalid_argument, "the CUDA device is " + std::to_string(device) + "; allowed: " + allowed);
  }
}

}  // namespace

void cuda_reach(int other) {
  require_device(other);
  int current = 0, can = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current != other && cudaDeviceCanAccessPeer(&can, current, other) == cudaSuccess && can != 0) {
    cudaDeviceEnablePeerAccess(other, 0);
  }
  cudaGetLastError();  // refused, or granted before
}

CudaDeviceScope::CudaDeviceScope(int device) {
  require_device(device);
  check(cudaGetDevice(&before_), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
}

CudaDeviceScope::~CudaDeviceScope() { cudaSetDevice(before_); }

CudaPin::CudaPin(const void* host, std::size_t bytes) : reason_() {
  void* const memory = const_cast<void*>(host);  // it is not written to
  const cudaError_t status = cudaHostRegister(memory, bytes, cudaHostRegisterPortable);
  if (status == cudaSuccess) {
    pinned_.reset(memory);
    return;
  }
  cudaGetLastError();
  if (status != cudaErrorHostMemoryAlreadyRegistered) {
    reason_ = std::string("cudaHostRegister: ") + cudaGetErrorString(status);
  }
}

void CudaPin::Release::operator()(void* host) const noexcept { cudaHostUnregister(host); }

CudaEvent::CudaEvent() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventBlockingSync), "cudaEventCreateWithFlags");
  event_ = event;
}

CudaEvent::~CudaEvent() { cudaEventDestroy(static_cast<cudaEvent_t>(event_)); }

void CudaEvent::record(const CudaStream& stream) {
  check(cudaEventRecord(static_cast<cudaEvent_t>(event_), static_cast<cudaStream_t>(stream.get())), "cudaEventRecord");
}

void CudaEvent::wait() const { check(cudaEventSynchronize(static_cast<cudaEvent_t>(event_)), "cudaEventSynchronize"); }

double CudaEvent::milliseconds_since(const CudaEvent& begin) const {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin.get()), static_cast<cudaEvent_t>(event_)),
        "cudaEventElapsedTime");
  return static_cast<double>(milliseconds);
}

CudaStream::CudaStream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  stream_ = stream;
}

CudaStream::~CudaStream() { cudaStreamDestroy(static_cast<cudaStream_t>(stream_)); }

void CudaStream::copy(const Rows& to, const ConstRows& from, std::size_t width, std::size_t rows) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (rows == 1) {
    check(cudaMemcpyAsync(to.data, from.data, width, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  } else {
    check(cudaMemcpy2DAsync(to.data, to.pitch, from.data, from.pitch, width, rows, cudaMemcpyDefault, stream),
          "cudaMemcpy2DAsync");
  }
}

void CudaStream::wait(const CudaEvent& event) {
  check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream_), static_cast<cudaEvent_t>(event.get()), 0),
        "cudaStreamWaitEvent");
}

void CudaStream::wait() const {
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream_)), "cudaStreamSynchronize");
}

}  // namespace v0
}  // namespace distr
