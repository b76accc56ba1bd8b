// SPDX-License-Identifier: Apache-2.0
// sm90/forward and sm90/forward_blocks without one of their stages: bf16, d = 64 and 128, exact attention and r = d/2;
// by blocks also lsh, which, as energy at d = 64, has no fusion to leave out.
#include <array>
#include <type_traits>

#include "cuda/sm90/forward_launch.h"
#include "cuda/sm90/gather_keys.cuh"
#include "cuda/sm90/heuristics.h"
#include "cuda/sm90/tma_keys.cuh"
#include "cuda/sm90/variants.cuh"
#include "gpu/forward_ablations.h"

namespace distr::test {
namespace {

namespace sm90 = cuda::sm90;
using sm90::ConsumerTmaKeys;
using sm90::GatherKeys;
using sm90::ScaleIn;
using sm90::TmaKeys;

template <class Stages, int kColumns, int kValues, ScaleIn kScaleIn, class KeyLoader = TmaKeys, int kConsumers = 2,
          int kCtasPerSm = 1>
constexpr sm90::Variant shape() {
  return sm90::variant<
      sm90::Config<__nv_bfloat16, kColumns, kValues, kConsumers, kScaleIn, KeyLoader, kCtasPerSm, Stages>>();
}

std::string no_shape_reason(const Problem& problem, const Grouping& grouping) {
  const bool has_one = problem.dtype == DType::bf16 && problem.head_dim % 64 == 0 && grouping.group_size <= 2;
  return has_one ? "" : "has ablations for bf16, d = 64 and 128, and G to 2";
}

template <class Stages>
struct Shapes {
  static constexpr std::array kVariants = {
      shape<Stages, 32, 64, ScaleIn::queries>(),  shape<Stages, 32, 64, ScaleIn::queries, TmaKeys, 3>(),
      shape<Stages, 64, 64, ScaleIn::softmax>(),  shape<Stages, 64, 64, ScaleIn::softmax, ConsumerTmaKeys, 2, 2>(),
      shape<Stages, 64, 128, ScaleIn::queries>(), shape<Stages, 128, 128, ScaleIn::softmax>()};
  static constexpr auto supports = sm90::forward_supports;
  static constexpr auto plan_among = sm90::plan_forward_among;

  static constexpr auto unsupported_reason = no_shape_reason;
};

template <class Stages>
struct BlocksShapes {
  static constexpr std::array kVariants = {
      shape<Stages, 64, 128, ScaleIn::queries, GatherKeys>(), shape<Stages, 64, 64, ScaleIn::queries>(),
      shape<Stages, 64, 64, ScaleIn::queries, TmaKeys, 3>(),
      shape<Stages, 64, 64, ScaleIn::queries, ConsumerTmaKeys, 2, 2>(), shape<Stages, 128, 128, ScaleIn::queries>()};
  static constexpr auto supports = sm90::forward_blocks_supports;
  static constexpr auto plan_among = sm90::plan_forward_among;

  static std::string unsupported_reason(const Problem& problem, const Grouping& grouping) {
    const std::string reason = no_shape_reason(problem, grouping);
    const bool gathers = sm90::product_of(problem, grouping) == sm90::Product::gathered;
    return reason.empty() && std::is_same_v<Stages, NoFusion> && !gathers ? "gathers no columns of K" : reason;
  }
};

}  // namespace

std::vector<ForwardAblation> hopper_forward_ablations(const ForwardKernel& kernel) {
  return {ablation_of<Shapes<NoExponential>>(kernel, "exponential"), ablation_of<Shapes<NoValues>>(kernel, "values")};
}

std::vector<ForwardAblation> hopper_blocks_ablations(const ForwardKernel& kernel) {
  return {ablation_of<BlocksShapes<NoExponential>>(kernel, "exponential"),
          ablation_of<BlocksShapes<NoFusion>>(kernel, "fusion"), ablation_of<BlocksShapes<NoValues>>(kernel, "values")};
}

}  // namespace distr::test
