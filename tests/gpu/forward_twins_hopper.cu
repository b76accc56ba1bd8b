// SPDX-License-Identifier: Apache-2.0
// sm90/forward without one of its stages (cuda/without.h): bf16, d = 64 and 128, exact attention and r = d/2.
#include <array>

#include "cuda/sm90/forward_launch.h"
#include "cuda/sm90/variants.cuh"
#include "gpu/twins.h"

namespace distr::test {
namespace {

using cuda::Without;
namespace sm90 = cuda::sm90;

template <Without kWithout, int kScores, int kValues, int kConsumers>
constexpr sm90::Variant twin() {
  return sm90::variant<sm90::Config<__nv_bfloat16, kScores, kValues, kConsumers, kWithout>>();
}

template <Without kWithout>
constexpr std::array kTwins = {twin<kWithout, 32, 64, 3>(), twin<kWithout, 64, 64, 3>(), twin<kWithout, 64, 128, 2>(),
                               twin<kWithout, 128, 128, 2>()};

template <Without kWithout>
std::string supports(const Problem& problem, const Grouping& grouping) {
  if (problem.dtype != DType::bf16 || problem.head_dim % 64 != 0 || grouping.group_size > 2) {
    return "has twins for bf16, d = 64 and 128, and G to 2";
  }
  const sm90::OtherVariants twins(kTwins<kWithout>);
  return sm90::forward_supports(problem, grouping);
}

template <Without kWithout>
void run(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const Execution& execution) {
  const sm90::OtherVariants twins(kTwins<kWithout>);
  sm90::run_forward(problem, grouping, tensors, execution);
}

template <Without kWithout>
ForwardTwin twin_of(ForwardKernel kernel, const char* without) {
  kernel.supports = supports<kWithout>;
  kernel.run = run<kWithout>;
  return {without, kernel};
}

}  // namespace

std::vector<ForwardTwin> hopper_forward_twins(const ForwardKernel& kernel) {
  return {twin_of<Without::exponential>(kernel, "exponential"), twin_of<Without::values>(kernel, "values")};
}

}  // namespace distr::test
