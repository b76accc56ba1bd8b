// SPDX-License-Identifier: Apache-2.0
// sm90/forward and sm90/forward_blocks without one of their stages (cuda/without.h): bf16, d = 64 and 128, exact
// attention and r = d/2; by blocks also lsh, which, as energy at d = 64, has no fusion to leave out.
#include <array>

#include "cuda/sm90/forward_launch.h"
#include "cuda/sm90/heuristics.h"
#include "cuda/sm90/variants.cuh"
#include "gpu/forward_twins.h"

namespace distr::test {
namespace {

using cuda::Without;
namespace sm90 = cuda::sm90;

template <Without kWithout, int kColumns, int kValues, sm90::Scores kScores,
          sm90::KeySource kSource = sm90::KeySource::copied, int kConsumers = 2, int kBlocks = 1>
constexpr sm90::Variant twin() {
  return sm90::variant<
      sm90::Config<__nv_bfloat16, kColumns, kValues, kConsumers, kScores, kSource, kWithout, kBlocks>>();
}

constexpr auto kCopied = sm90::KeySource::copied;
constexpr auto kPicked = sm90::KeySource::picked;

std::string refusal_of_twins(const Problem& problem, const Grouping& grouping) {
  const bool has_one = problem.dtype == DType::bf16 && problem.head_dim % 64 == 0 && grouping.group_size <= 2;
  return has_one ? "" : "has twins for bf16, d = 64 and 128, and G to 2";
}

template <Without kWithout>
struct Twins {
  static constexpr std::array kVariants = {twin<kWithout, 32, 64, sm90::Scores::logarithms>(),
                                           twin<kWithout, 32, 64, sm90::Scores::logarithms, kCopied, 3>(),
                                           twin<kWithout, 64, 64, sm90::Scores::raw>(),
                                           twin<kWithout, 64, 64, sm90::Scores::raw, kCopied, 2, 2>(),
                                           twin<kWithout, 64, 128, sm90::Scores::logarithms>(),
                                           twin<kWithout, 128, 128, sm90::Scores::raw>()};
  static constexpr auto supports = sm90::forward_supports;
  static constexpr auto plan_among = sm90::plan_forward_among;

  static constexpr auto refusal = refusal_of_twins;
};

template <Without kWithout>
struct BlocksTwins {
  static constexpr std::array kVariants = {twin<kWithout, 64, 128, sm90::Scores::logarithms, kPicked>(),
                                           twin<kWithout, 64, 64, sm90::Scores::logarithms>(),
                                           twin<kWithout, 64, 64, sm90::Scores::logarithms, kCopied, 3>(),
                                           twin<kWithout, 64, 64, sm90::Scores::logarithms, kCopied, 2, 2>(),
                                           twin<kWithout, 128, 128, sm90::Scores::logarithms>()};
  static constexpr auto supports = sm90::forward_blocks_supports;
  static constexpr auto plan_among = sm90::plan_forward_among;
  static std::string refusal(const Problem& problem, const Grouping& grouping) {
    const std::string reason = refusal_of_twins(problem, grouping);
    const bool picks = sm90::product_of(problem, grouping) == sm90::Product::picked;
    return reason.empty() && kWithout == Without::fusion && !picks ? "picks no columns of K" : reason;
  }
};

}  // namespace

std::vector<ForwardTwin> hopper_forward_twins(const ForwardKernel& kernel) {
  return {twin_of<Twins<Without::exponential>>(kernel, "exponential"),
          twin_of<Twins<Without::values>>(kernel, "values")};
}

std::vector<ForwardTwin> hopper_blocks_twins(const ForwardKernel& kernel) {
  return {twin_of<BlocksTwins<Without::exponential>>(kernel, "exponential"),
          twin_of<BlocksTwins<Without::fusion>>(kernel, "fusion"),
          twin_of<BlocksTwins<Without::values>>(kernel, "values")};
}

}  // namespace distr::test
