// SPDX-License-Identifier: Apache-2.0
// sm80/forward without one of its stages: bf16, d = 64 and 128, exact attention and LSH with G = 2, and without the
// fusion LSH with G = 4 as well.
#include "gpu/forward_ablations.h"

#include <array>
#include <string>

#include "cuda/sm80/forward_launch.h"
#include "cuda/sm80/variants.cuh"

namespace distr::test {
namespace {

namespace sm80 = cuda::sm80;

template <class Stages, int kDim, int kGroups, int kMembers>
constexpr sm80::Variant shape() {
  return sm80::variant<sm80::Config<__nv_bfloat16, kDim, kGroups, 128, kMembers, Stages>>();
}

template <class Stages>
constexpr std::array kShapes = {shape<Stages, 64, 64, 1>(), shape<Stages, 128, 128, 1>(), shape<Stages, 64, 32, 2>(),
                                shape<Stages, 128, 64, 2>()};
template <>
constexpr std::array kShapes<NoFusion> = {shape<NoFusion, 64, 32, 2>(), shape<NoFusion, 128, 64, 2>(),
                                          shape<NoFusion, 64, 16, 4>(), shape<NoFusion, 128, 32, 4>()};

template <class Stages>
struct Shapes {
  static constexpr std::array kVariants = kShapes<Stages>;
  static constexpr auto supports = sm80::forward_supports;
  static constexpr auto plan_among = sm80::plan_forward_among;

  static std::string unsupported_reason(const Problem& problem, const Grouping& grouping) {
    if (problem.dtype != DType::bf16 || problem.head_dim % 64 != 0 || problem.causal != Causal::none) {
      return "has ablations for bf16, d = 64 and 128, not causal";
    }
    const auto own = sm80::plan_forward(problem, grouping, {}).tiles;
    try {
      const auto others = plan_among(kVariants, problem, grouping, {}).tiles;
      // It would take another: the exact one of Q~.
      return others.front() == own.front() ? "" : "has no ablation of its shape";
    } catch (const Error& error) {
      return error.what();
    }
  }
};

}  // namespace

std::vector<ForwardAblation> forward_ablations(const ForwardKernel& kernel) {
  if (kernel.name == std::string("sm90/forward")) {
    return hopper_forward_ablations(kernel);
  }
  if (kernel.name == std::string("sm90/forward_blocks")) {
    return hopper_blocks_ablations(kernel);
  }
  if (kernel.name != std::string("sm80/forward")) {
    return {};
  }
  return {ablation_of<Shapes<NoExponential>>(kernel, "exponential"), ablation_of<Shapes<NoFusion>>(kernel, "fusion"),
          ablation_of<Shapes<NoValues>>(kernel, "values")};
}

}  // namespace distr::test
