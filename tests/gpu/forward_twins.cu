// SPDX-License-Identifier: Apache-2.0
// sm80/forward without one of its stages (cuda/without.h): bf16, d = 64 and 128, exact attention and LSH with G = 2.
#include <array>
#include <string>

#include "cuda/sm80/forward_launch.h"
#include "cuda/sm80/variants.cuh"
#include "gpu/twins.h"
#include "tiles.h"

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
constexpr std::array kTwins<Without::fusion> = {twin<Without::fusion, 64, 32, 2>(),
                                                twin<Without::fusion, 128, 64, 2>()};

template <Without kWithout>
std::string supports(const Problem& problem, const Grouping& grouping) {
  if (problem.dtype != DType::bf16 || problem.head_dim % 64 != 0 || problem.causal != Causal::none) {
    return "has twins for bf16, d = 64 and 128, not causal";
  }
  constexpr std::int64_t kRows = 128;
  if (sm80::forward_supports(problem, grouping).empty() &&
      sm80::forward_tiles(problem, grouping).front().rows != kRows) {
    return "has twins for tiles of 128 queries";
  }
  const sm80::OtherVariants twins(kTwins<kWithout>);
  return sm80::forward_supports(problem, grouping);
}

template <Without kWithout>
std::size_t workspace_bytes(const Problem& problem, const Grouping& grouping, int threads) {
  const sm80::OtherVariants twins(kTwins<kWithout>);
  return sm80::forward_workspace_bytes(problem, grouping, threads);
}

template <Without kWithout>
void run(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const Execution& execution) {
  const sm80::OtherVariants twins(kTwins<kWithout>);
  sm80::run_forward(problem, grouping, tensors, execution);
}

template <Without kWithout>
ForwardTwin twin_of(ForwardKernel kernel, const char* without) {
  kernel.supports = supports<kWithout>;
  kernel.workspace_bytes = workspace_bytes<kWithout>;
  kernel.run = run<kWithout>;
  return {without, kernel};
}

}  // namespace

std::vector<ForwardTwin> forward_twins(const ForwardKernel& kernel) {
  if (kernel.name == std::string("sm90/forward")) {
    return hopper_forward_twins(kernel);
  }
  if (kernel.name != std::string("sm80/forward")) {
    return {};
  }
  return {twin_of<Without::exponential>(kernel, "exponential"), twin_of<Without::fusion>(kernel, "fusion"),
          twin_of<Without::values>(kernel, "values")};
}

}  // namespace distr::test
