// SPDX-License-Identifier: Apache-2.0
// The kernels of the CUDA backend, in order of preference. What holds for all of them is checked here: that there is a
// device they can run on, and that the tensors are in its memory.
#include <array>
#include <utility>

#include "cuda/grouping.h"
#include "cuda/launch.h"
#include "cuda/plain/plain.h"
#include "cuda/sm80/backward_launch.h"
#include "cuda/sm80/forward_launch.h"
#include "cuda/sm90/backward_launch.h"
#include "cuda/sm90/forward_launch.h"
#include "kernel.h"

namespace distr {
namespace cuda {
namespace {

// Why the problem is not served, first of all, and then why nothing is.
template <auto kSupports>
std::string supports(const Problem& problem, const Grouping& grouping) {
  const std::string reason = kSupports(problem, grouping);
  return reason.empty() ? unusable_reason() : reason;
}

// Memory that the device cannot reach would fail in the kernel, long after the call.
void require_device_memory(const void* pointer, const char* name) {
  if (pointer == nullptr) {
    return;
  }
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeUnregistered) {
    throw Error(Status::invalid_argument, std::string(name) + " is in host memory; allowed: memory of the CUDA device");
  }
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
    throw Error(Status::invalid_argument, std::string(name) + " is in the memory of device " +
                                              std::to_string(attributes.device) + "; allowed: the current device, " +
                                              std::to_string(device));
  }
}

using Named = std::pair<const void*, const char*>;

template <std::size_t kCount>
void require_device_memory(const std::array<Named, kCount>& tensors) {
  for (const auto& [pointer, name] : tensors) {
    require_device_memory(pointer, name);
  }
}

void require_device_memory(const GroupingTensors& t) {
  require_device_memory(std::array<Named, 3>{{{t.q, "Q"}, {t.k, "K"}, {t.order, "the order"}}});
}

void require_device_memory(const ForwardTensors& t) {
  require_device_memory(std::array<Named, 7>{
      {{t.q, "Q"}, {t.k, "K"}, {t.v, "V"}, {t.mask, "the mask"}, {t.order, "the order"}, {t.o, "O"}, {t.lse, "LSE"}}});
}

void require_device_memory(const BackwardTensors& t) {
  require_device_memory(ForwardTensors{t.q, t.k, t.v, t.mask, t.order});
  require_device_memory(std::array<Named, 8>{{{t.o, "O"},
                                              {t.lse, "LSE"},
                                              {t.d_o, "dO"},
                                              {t.d_lse, "dLSE"},
                                              {t.d_q, "dQ"},
                                              {t.d_k, "dK"},
                                              {t.d_v, "dV"},
                                              {t.d_mask, "the mask's gradient"}}});
}

template <auto kRun, class Tensors>
void run(const Problem& problem, const Grouping& grouping, const Tensors& tensors, const Execution& execution) {
  require_device_memory(tensors);
  require_device_memory(execution.workspace, "the workspace");
  kRun(problem, grouping, tensors, execution);
}

template <class Tensors, auto kSupports, auto kWorkspaceBytes, auto kRun>
constexpr KernelEntry<Tensors> entry(const char* name) {
  return {name, Device::cuda, supports<kSupports>, kWorkspaceBytes, run<kRun, Tensors>};
}

template <class Tensors>
constexpr KernelEntry<Tensors> not_deterministic(KernelEntry<Tensors> kernel) {
  kernel.deterministic = false;
  return kernel;
}

constexpr std::array<GroupingKernel, 3> kGrouping{
    entry<GroupingTensors, identity::supports, identity::workspace_bytes, identity::run>("cuda/exact"),
    entry<GroupingTensors, lsh::supports, lsh::workspace_bytes, lsh::run>("cuda/lsh"),
    entry<GroupingTensors, energy::supports, energy::workspace_bytes, energy::run>("cuda/energy")};
constexpr std::array<ForwardKernel, 4> kForward{
    entry<ForwardTensors, sm90::forward_supports, sm90::forward_workspace_bytes, sm90::run_forward>("sm90/forward"),
    entry<ForwardTensors, sm90::forward_blocks_supports, sm90::forward_workspace_bytes, sm90::run_forward>(
        "sm90/forward_blocks"),
    entry<ForwardTensors, sm80::forward_supports, sm80::forward_workspace_bytes, sm80::run_forward>("sm80/forward"),
    entry<ForwardTensors, plain::supports, plain::forward_workspace_bytes, plain::run_forward>("plain/forward")};
constexpr BackwardKernel kPortable =
    entry<BackwardTensors, sm80::backward_supports, sm80::backward_workspace_bytes, sm80::run_backward>(
        "sm80/backward");
constexpr BackwardKernel kPortableAtomics = not_deterministic(
    entry<BackwardTensors, sm80::backward_supports, sm80::backward_atomics_workspace_bytes, sm80::run_backward_atomics>(
        "sm80/backward_atomics"));
constexpr BackwardKernel kHopper =
    entry<BackwardTensors, sm90::backward_supports, sm90::backward_workspace_bytes, sm90::run_backward>(
        "sm90/backward");
constexpr BackwardKernel kHopperAtomics = not_deterministic(
    entry<BackwardTensors, sm90::backward_supports, sm90::backward_atomics_workspace_bytes, sm90::run_backward_atomics>(
        "sm90/backward_atomics"));
constexpr std::array<BackwardKernel, 5> kBackward{
    kHopperAtomics, kHopper, kPortableAtomics, kPortable,
    entry<BackwardTensors, plain::supports, plain::backward_workspace_bytes, plain::run_backward>("plain/backward")};

}  // namespace
}  // namespace cuda

Backend cuda_backend() { return {cuda::kGrouping, cuda::kForward, cuda::kBackward}; }

}  // namespace distr
