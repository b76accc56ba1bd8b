// SPDX-License-Identifier: Apache-2.0
#include "cpu/entries.h"

#include <hwy/highway.h>

#include <array>

#include "common/near.h"
#include "cpu/heuristics.h"

namespace distr {
namespace cpu {
namespace {

std::string supports(const Problem& problem, const Grouping& /*grouping*/) {
  return problem.dtype == DType::f64 ? "computes in fp32; f64 is for the reference" : "";
}

std::string supports_pairs(const Problem& problem, const Grouping& /*grouping*/) {
  if (problem.dtype != DType::bf16) {
    return "is for bf16";
  }
  return products_of_bf16() != Products::of_floats ? ""
                                                   : "is for CPUs with AMX's tiles of bf16, and AMD's with AVX512_BF16";
}

constexpr std::array<GroupingKernel, 1> kGrouping{{{"cpu/grouping", Device::cpu, supports, plan_grouping}}};
constexpr std::array<ForwardKernel, 2> kForward{{{"cpu/forward_bf16", Device::cpu, supports_pairs, plan_forward_bf16},
                                                 {"cpu/forward", Device::cpu, supports, plan_forward}}};
constexpr std::array<BackwardKernel, 2> kBackward{
    {{"cpu/backward_bf16", Device::cpu, supports_pairs, plan_backward_bf16},
     {"cpu/backward", Device::cpu, supports, plan_backward}}};

}  // namespace
}  // namespace cpu

Advice cpu_advice(const Problem& problem, const Grouping& grouping) {
  const cpu::Products products = problem.dtype == DType::bf16 ? cpu::products_of_bf16() : cpu::Products::of_floats;
  if (products == cpu::Products::of_pairs_in_tiles && !cpu::kApproximationsPayInTiles) {
    return {false, "as an approximation was never measured to pay in bf16 where AMX multiplies"};
  }
  if (products == cpu::Products::of_pairs && common::has_near_keys(grouping) && problem.head_dim < cpu::kNearPairsPay) {
    return {false,
            "as in bf16 an approximation with near keys is about 1.13 times as quick as exact attention, or less, for "
            "head_dim " +
                std::to_string(problem.head_dim)};
  }
  return common::advice_by(cpu::kCrossovers, problem);
}

Backend cpu_backend() { return {cpu::kGrouping, cpu::kForward, cpu::kBackward}; }

inline namespace v0 {

std::string instruction_set() {
  const auto supported = static_cast<std::uint32_t>(hwy::SupportedTargets() & HWY_TARGETS);
  const std::string name =
      hwy::TargetName(static_cast<std::int64_t>(supported & (0U - supported)));  // of the lowest bit
  return cpu::products_of_bf16() == cpu::Products::of_pairs_in_tiles ? name + " and AMX" : name;
}

}  // namespace v0
}  // namespace distr
