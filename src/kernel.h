// SPDX-License-Identifier: Apache-2.0
// What a backend offers: entries, one a kernel and operation, in order of preference.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "distr/attention.h"

namespace distr {

template <class Tensors>
struct KernelEntry {
  const char* name;  // "backend/algorithm"
  Device device;
  // Why the kernel cannot serve; empty: it can.
  std::string (*supports)(const Problem&, const Grouping&);
  std::size_t (*workspace_bytes)(const Problem&, const Grouping&, int threads);
  // Everything is validated, the grouping's strategy is not `automatic`, threads >= 1, the workspace is large enough.
  void (*run)(const Problem&, const Grouping&, const Tensors&, const Execution&);
  bool deterministic = true;  // else it is for calls that do not ask for the same bits in every run
};

using GroupingKernel = KernelEntry<GroupingTensors>;
using ForwardKernel = KernelEntry<ForwardTensors>;
using BackwardKernel = KernelEntry<BackwardTensors>;

struct Backend {
  std::span<const GroupingKernel> grouping;
  std::span<const ForwardKernel> forward;
  std::span<const BackwardKernel> backward;
};

// The backends of this build. A backend that was left out is an empty list (src/cuda/absent.cpp).
Backend reference_backend();
Backend cpu_backend();
Backend cuda_backend();

// Names of the CUDA devices that could be used; empty: none, `reason` says why.
std::vector<std::string> cuda_device_names(std::string& reason);

// Exact attention: by strategy, or because every column is a group of its own.
[[nodiscard]] inline bool is_exact(const Grouping& grouping) noexcept {
  return grouping.strategy == Strategy::exact || grouping.group_size == 1;
}

}  // namespace distr
