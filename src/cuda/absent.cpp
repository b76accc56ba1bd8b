// SPDX-License-Identifier: Apache-2.0
// The CUDA backend of a build without CUDA: an empty list, no memory.
#include "cuda/heuristics.h"
#include "distr/device.h"
#include "kernel.h"

namespace distr {
namespace {

constexpr const char* kReason = "this build has no CUDA kernels";

[[noreturn]] void refuse() { throw Error(Status::unsupported, std::string("CUDA cannot be used: ") + kReason); }

}  // namespace

Backend cuda_backend() { return {}; }

std::vector<std::string> cuda_device_names(std::string& reason) {
  reason = kReason;
  return {};
}

Advice cuda_advice(const Problem& problem, const Grouping& grouping) { return cuda::advise(problem, grouping, {}); }

void cuda_merge(const Problem& /*problem*/, std::span<const Partial> /*parts*/, void* /*o*/, void* /*lse*/,
                const Execution& /*execution*/) {
  refuse();
}

inline namespace v0 {

std::string cuda_unusable_reason() { return kReason; }
CudaDevice cuda_device() { refuse(); }
CudaMemory::CudaMemory(std::size_t /*bytes*/) { refuse(); }
void CudaMemory::Free::operator()(void* /*data*/) const noexcept {}
void CudaMemory::copy_from(const void* /*host*/, std::size_t /*bytes*/, void* /*stream*/) { refuse(); }
void CudaMemory::copy_to(void* /*host*/, std::size_t /*bytes*/, void* /*stream*/) const { refuse(); }
void CudaMemory::fill(std::uint8_t /*value*/, void* /*stream*/) { refuse(); }
int cuda_device_count() noexcept { return 0; }
void cuda_reach(int /*other*/) { refuse(); }
CudaDeviceScope::CudaDeviceScope(int /*device*/) { refuse(); }
CudaDeviceScope::~CudaDeviceScope() { before_ = 0; }
CudaPin::CudaPin(const void* /*host*/, std::size_t /*bytes*/) { refuse(); }
void CudaPin::Release::operator()(void* /*host*/) const noexcept {}
CudaEvent::CudaEvent() { refuse(); }
CudaEvent::~CudaEvent() { event_ = nullptr; }
void CudaEvent::record(const CudaStream& /*stream*/) { refuse(); }
void CudaEvent::wait() const { refuse(); }
double CudaEvent::milliseconds_since(const CudaEvent& /*begin*/) const { refuse(); }
CudaStream::CudaStream() { refuse(); }
CudaStream::~CudaStream() { stream_ = nullptr; }
void CudaStream::copy(const Rows& /*to*/, const ConstRows& /*from*/, std::size_t /*width*/, std::size_t /*rows*/) {
  refuse();
}
void CudaStream::wait(const CudaEvent& /*event*/) { refuse(); }
void CudaStream::wait() const { refuse(); }
CudaStopwatch::~CudaStopwatch() = default;
void CudaStopwatch::mark() { refuse(); }
std::vector<double> CudaStopwatch::laps() { refuse(); }

}  // namespace v0

}  // namespace distr
