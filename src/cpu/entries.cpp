// SPDX-License-Identifier: Apache-2.0
#include "cpu/entries.h"

#include <hwy/highway.h>

#include <array>

namespace distr {
namespace cpu {
namespace {

std::string supports(const Problem& problem, const Grouping& /*grouping*/) {
  return problem.dtype == DType::f64 ? "computes in fp32; f64 is for the reference" : "";
}

constexpr std::array<GroupingKernel, 1> kGrouping{
    {{"cpu/grouping", Device::cpu, supports, grouping_workspace_bytes, run_grouping}}};
constexpr std::array<ForwardKernel, 1> kForward{
    {{"cpu/forward", Device::cpu, supports, forward_workspace_bytes, run_forward}}};
constexpr std::array<BackwardKernel, 1> kBackward{
    {{"cpu/backward", Device::cpu, supports, backward_workspace_bytes, run_backward}}};

}  // namespace
}  // namespace cpu

Backend cpu_backend() { return {cpu::kGrouping, cpu::kForward, cpu::kBackward}; }

inline namespace v0 {

std::string instruction_set() {
  const auto supported = static_cast<std::uint32_t>(hwy::SupportedTargets() & HWY_TARGETS);
  return hwy::TargetName(static_cast<std::int64_t>(supported & (0U - supported)));  // the lowest bit is the best
}

}  // namespace v0
}  // namespace distr
