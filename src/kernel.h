// SPDX-License-Identifier: Apache-2.0
// What a backend offers: entries, one a kernel and operation, in order of preference.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/advice.h"
#include "common/grouping.h"
#include "distr/plan.h"

namespace distr {

// Lays out a workspace: named parts behind each other, each at a multiple of the alignment.
class WorkspaceLayout {
 public:
  explicit WorkspaceLayout(std::size_t alignment = 256) : alignment_(alignment) {}

  // The offset of the new part. A part of no bytes is not listed.
  std::size_t add(const char* name, std::size_t bytes) {
    const std::size_t offset = bytes_;
    if (bytes > 0) {
      parts_.push_back({name, offset, bytes});
      bytes_ += (bytes + alignment_ - 1) / alignment_ * alignment_;
    }
    return offset;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::span<const WorkspacePart> parts() const noexcept { return parts_; }

 private:
  std::size_t alignment_;
  std::vector<WorkspacePart> parts_;
  std::size_t bytes_ = 0;
};

// What a kernel has decided for one call. The problem, grouping and execution that it was made for outlive it, so it
// may refer to them.
template <class Tensors>
struct KernelPlan {
  WorkspaceLayout workspace;
  std::vector<LaunchShape> launches;
  std::vector<TileShape> tiles;  // that the kernel has for the problem, the one that it takes first
  // The tensors are checked and the workspace is large enough. Of `execution` only what may differ from run to run is
  // read: stream, workspace, parallel, progress.
  std::function<void(const Tensors& tensors, const Execution& execution)> run;
};

template <class Tensors>
struct KernelEntry {
  const char* name;  // "backend/algorithm"
  Device device;
  // Why the kernel cannot serve; empty: it can.
  std::string (*supports)(const Problem&, const Grouping&);
  // Everything is validated, supports() holds, the strategy is not `automatic`, threads >= 1. A tile of
  // execution.tile_rows rows is taken where the kernel has one.
  KernelPlan<Tensors> (*plan)(const Problem&, const Grouping&, const Execution&);
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

// Whether an approximation pays on a device, for a group size above 1 (method, 2, "Strategy auto").
Advice cpu_advice(const Problem& problem, const Grouping& grouping);
Advice cuda_advice(const Problem& problem, const Grouping& grouping);

// merge() of tensors in CUDA memory; the problem and the pointers are checked.
void cuda_merge(const Problem& problem, std::span<const Partial> parts, void* o, void* lse, const Execution& execution);

// Names of the CUDA devices that could be used; empty: none, `reason` says why.
std::vector<std::string> cuda_device_names(std::string& reason);

}  // namespace distr
