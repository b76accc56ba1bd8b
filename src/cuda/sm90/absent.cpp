// SPDX-License-Identifier: Apache-2.0
// Hopper's own kernels in a build that is not for Hopper: they serve nothing.
#include "cuda/sm90/backward_launch.h"
#include "cuda/sm90/forward_launch.h"
#include "distr/error.h"

namespace distr::cuda::sm90 {
namespace {

constexpr const char* kReason = "this build has no kernels of Hopper's own (CUDA architecture 90)";

[[noreturn]] void refuse() { throw Error(Status::unsupported, kReason); }

}  // namespace

std::string forward_supports(const Problem& /*problem*/, const Grouping& /*grouping*/) { return kReason; }
std::string forward_blocks_supports(const Problem& /*problem*/, const Grouping& /*grouping*/) { return kReason; }
std::string backward_supports(const Problem& /*problem*/, const Grouping& /*grouping*/) { return kReason; }

KernelPlan<ForwardTensors> plan_forward(const Problem& /*problem*/, const Grouping& /*grouping*/,
                                        const Execution& /*execution*/) {
  refuse();
}
KernelPlan<BackwardTensors> plan_backward(const Problem& /*problem*/, const Grouping& /*grouping*/,
                                          const Execution& /*execution*/) {
  refuse();
}
KernelPlan<BackwardTensors> plan_backward_atomics(const Problem& /*problem*/, const Grouping& /*grouping*/,
                                                  const Execution& /*execution*/) {
  refuse();
}

}  // namespace distr::cuda::sm90
