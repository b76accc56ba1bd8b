// SPDX-License-Identifier: Apache-2.0
// Runs one kernel of the CUDA backend on tensors in host memory, and watches what it does beside its job: it must write
// nowhere else, do the same twice (but for dQ, if it is not deterministic), and be capturable (no allocation, no
// synchronisation, no other stream).
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

#include "kernel.h"

namespace distr::test {

// What a kernel did wrong.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The device no longer answers: nothing that follows means anything.
class DeviceDead : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A stream of the calling thread that does not wait for the default one, on which nothing may be put while another
// thread captures.
[[nodiscard]] cudaStream_t thread_stream();

// On the current device and that stream, without a workspace.
[[nodiscard]] Execution on_device();

// From here on workspaces are not poisoned (nor looked at), so that compute-sanitizer's initcheck can tell what a
// kernel reads there before it has written it.
void leave_workspace_uninitialized();

// Copies the inputs to device memory (each an allocation of its own, aligned to 16 bytes as the host's pointer is) and
// the poisoned outputs between canaries; runs the kernel on a stream of this thread in a workspace of exactly the size
// it asks for, poisoned and between canaries, once directly and once out of a captured graph; copies the outputs back.
// Throws Fault, DeviceDead, and what the kernel throws.
void run_on_device(const GroupingKernel& kernel, const Problem& problem, const Grouping& grouping,
                   const GroupingTensors& tensors);
void run_on_device(const ForwardKernel& kernel, const Problem& problem, const Grouping& grouping,
                   const ForwardTensors& tensors);
void run_on_device(const BackwardKernel& kernel, const Problem& problem, const Grouping& grouping,
                   const BackwardTensors& tensors);

}  // namespace distr::test
