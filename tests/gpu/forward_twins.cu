// SPDX-License-Identifier: Apache-2.0
// sm80/forward without one of its stages (cuda/without.h): bf16, d = 64 and 128, exact attention and LSH with G = 2,
// and without the fusion LSH with G = 4 as well.
#include <array>
#include <string>

#include "cuda/sm80/forward_launch.h"
#include "cuda/sm80/variants.cuh"
#include "gpu/forward_twins.h"

namespace distr::test {
namespace {

using cuda::Without;
namespace sm80 = cuda::sm80;

template <Without kWithout, int kDim, int kGroups, int kMembers>
constexpr sm80::Variant twin() {
  return sm80::variant<sm80::Config<__nv_bfloat16, kDim, kGroups, 128, kMembers, kWithout>>();
}

template <Without kWithout>
constexpr std::array kTwins = {twin<kWithout, 64, 64, 1>(), twin<kWithout, 128, 128, 1>(), twin<kWithout, 64, 32, 2>(),
                               twin<kWithout, 128, 64, 2>()};
template <>
constexpr std::array kTwins<Without::fusion> = {twin<Without::fusion, 64, 32, 2>(), twin<Without::fusion, 128, 64, 2>(),
                                                twin<Without::fusion, 64, 16, 4>(),
                                                twin<Without::fusion, 128, 32, 4>()};

template <Without kWithout>
struct Twins {
  static constexpr std::array kVariants = kTwins<kWithout>;
  static constexpr auto supports = sm80::forward_supports;
  static constexpr auto plan_among = sm80::plan_forward_among;

  // Of a problem that the kernel serves.
  static std::string refusal(const Problem& problem, const Grouping& grouping) {
    if (problem.dtype != DType::bf16 || problem.head_dim % 64 != 0 || problem.causal != Causal::none) {
      return "has twins for bf16, d = 64 and 128, not causal";
    }
    const auto own = sm80::plan_forward(problem, grouping, {}).tiles;
    try {
      const auto twins = plan_among(kVariants, problem, grouping, {}).tiles;
      return twins.front() == own.front() ? ""
                                          : "has no twin of its shape";  // it would take another: the exact one of Q~
    } catch (const Error& error) {
      return error.what();
    }
  }
};

}  // namespace

std::vector<ForwardTwin> forward_twins(const ForwardKernel& kernel) {
  if (kernel.name == std::string("sm90/forward")) {
    return hopper_forward_twins(kernel);
  }
  if (kernel.name == std::string("sm90/forward_blocks")) {
    return hopper_blocks_twins(kernel);
  }
  if (kernel.name != std::string("sm80/forward")) {
    return {};
  }
  return {twin_of<Twins<Without::exponential>>(kernel, "exponential"),
          twin_of<Twins<Without::fusion>>(kernel, "fusion"), twin_of<Twins<Without::values>>(kernel, "values")};
}

}  // namespace distr::test
