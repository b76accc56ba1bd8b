// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "reference/head.h"

namespace distr {
namespace reference {
namespace {

std::string supports(const Problem& /*problem*/, const Grouping& /*grouping*/) { return {}; }
std::size_t no_workspace(const Problem& /*problem*/, const Grouping& /*grouping*/, int /*threads*/) { return 0; }

constexpr std::array<GroupingKernel, 1> kGrouping{
    {{"reference/grouping", Device::cpu, supports, no_workspace, run_grouping}}};
constexpr std::array<ForwardKernel, 1> kForward{
    {{"reference/forward", Device::cpu, supports, no_workspace, run_forward}}};
constexpr std::array<BackwardKernel, 1> kBackward{
    {{"reference/backward", Device::cpu, supports, no_workspace, run_backward}}};

}  // namespace
}  // namespace reference

Backend reference_backend() { return {reference::kGrouping, reference::kForward, reference::kBackward}; }

}  // namespace distr
