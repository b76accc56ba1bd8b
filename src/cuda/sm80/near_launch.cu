// SPDX-License-Identifier: Apache-2.0
// What a call of the sm_80 forward with near keys does: K^T and packed copies where they are needed, then one launch of
// the kernel. The kernel is compiled for each element and for d and dv to 64 and to 128; how many columns the grouping
// keeps is known when it runs. A thread block owns 64 or 128 rows of a head (near.cuh says what its warps do, and what
// is in shared memory). Keys are not split among thread blocks: L_i, which far scores are held against, would have to
// come first, by a launch of its own, and where rows are so few that a split would pay little is far.
#include "cuda/sm80/near_launch.h"

#include <algorithm>
#include <array>
#include <vector>

#include "cuda/heuristics.h"
#include "cuda/launch.h"
#include "cuda/prepare/operand.h"
#include "cuda/prepare/transpose.h"
#include "cuda/sm80/heuristics.h"
#include "cuda/sm80/near.cuh"

namespace distr::cuda::sm80 {
namespace {

// Positions that Q and K^T have in shared memory (near.cuh).
std::int64_t positions(const Problem& problem, const Grouping& grouping) {
  const auto steps = [](std::int64_t columns) { return common::ceil_div(columns, 16) * 16; };
  const std::int64_t kept = is_exact(grouping) ? problem.head_dim : num_groups(problem, grouping);
  return std::max({steps(kept) + steps(problem.head_dim - kept), steps(problem.head_dim), problem.head_dim_v});
}

template <class T, int kDim, int kRows>
void launch_near(const NearParameters& parameters, void* stream) {
  using C = Config<T, kDim, kDim, kRows, 1>;
  allow_shared_memory<near_forward<C>, sizeof(NearStorage<C>)>();
  launch_dependent(near_forward<C>, dim3(parameters.forward.scheduler.count()), C::kThreads, sizeof(NearStorage<C>),
                   stream, parameters);
}

struct NearVariant {
  DType dtype;
  int dim, rows;  // d and dv up to it; of a thread block
  bool masks;     // and windows' left ends
  std::int64_t shared_bytes;
  void (*launch)(const NearParameters& parameters, void* stream);
};

template <class T, int kDim, int kRows>
constexpr NearVariant variant() {
  using C = Config<T, kDim, kDim, kRows, 1>;
  return {kDTypeOf<T>, kDim, kRows, C::kMasks, sizeof(NearStorage<C>), launch_near<T, kDim, kRows>};
}

// Those of more rows before the others.
constexpr std::array kNearVariants = {variant<__half, 64, 64>(),          variant<__half, 128, 64>(),
                                      variant<__nv_bfloat16, 64, 128>(),  variant<__nv_bfloat16, 64, 64>(),
                                      variant<__nv_bfloat16, 128, 128>(), variant<__nv_bfloat16, 128, 64>()};

// Whether all rows of a thread block have the same columns and near keys.
bool share_keys(const Problem& problem, const Grouping& grouping, std::int64_t rows) {
  return grouping.block % rows == 0 || grouping.block >= problem.seq_q;
}

// Those that serve a problem.
std::vector<const NearVariant*> all_of(const Problem& problem, const Grouping& grouping) {
  const std::int64_t needed = positions(problem, grouping);
  const bool masks = changes_scores(problem) || problem.window_left.has_value();
  std::vector<const NearVariant*> result;
  for (const NearVariant& v : kNearVariants) {
    if (v.dtype == problem.dtype && v.dim >= needed && (v.masks || !masks) && share_keys(problem, grouping, v.rows) &&
        (result.empty() || v.dim == result.front()->dim)) {
      result.push_back(&v);
    }
  }
  return result;
}

// The one of them to take. tile_rows: the caller's, or 0.
const NearVariant& choose(const std::vector<const NearVariant*>& variants, const Problem& problem,
                          std::int64_t tile_rows) {
  const bool is_causal = problem.causal != Causal::none;
  const std::int64_t resident_of_least = fitting_ctas(variants.back()->shared_bytes);
  const double scores = scores_per_sm(problem, 0, problem.seq_q, device_properties().num_sms);
  for (const NearVariant* v : variants) {
    const bool pays =
        near_rows_pay(v->dim, v->rows, is_causal, scores, fitting_ctas(v->shared_bytes), resident_of_least);
    if (tile_rows > 0 ? v->rows == tile_rows : pays) {
      return *v;
    }
  }
  return *variants.back();
}

}  // namespace

std::string near_unsupported_reason(const Problem& problem, const Grouping& grouping) {
  if (problem.softcap != 0) {
    return "has near keys where scores are not capped";  // what means add to far scores comes behind the product
  }
  if (!is_exact(grouping) && common::members_of(grouping) > 1) {
    return "has near keys where groups are columns, not sums of them";
  }
  if (!share_keys(problem, grouping, common::kSkipRows)) {
    return "has near keys for blocks that 64 divides";
  }
  if (all_of(problem, grouping).empty()) {
    return "has near keys for head_dim_v up to 128, and as many columns, where kept and dropped ones are each counted "
           "in 16s";
  }
  return "";
}

KernelPlan<ForwardTensors> plan_near_forward(const Problem& problem, const Grouping& grouping,
                                             const Execution& execution) {
  constexpr int kThreads = 128;
  KernelPlan<ForwardTensors> result;
  const std::vector<const NearVariant*> variants = all_of(problem, grouping);
  const NearVariant& variant = choose(variants, problem, execution.tile_rows);
  const Extent k_extent{problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim};
  const Input q = Input::for_cp_async("Q", problem.q, {problem.batch, problem.heads_q, problem.seq_q, problem.head_dim},
                                      result.workspace);
  const Input v = Input::for_cp_async(
      "V", problem.v, {problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim_v}, result.workspace);
  const Part<std::uint16_t> columns(result.workspace, "K^T", transposed_count(k_extent));
  NearParameters parameters{};
  ForwardParameters& forward = parameters.forward;
  forward.problem = device_problem(problem, grouping);
  forward.problem.q = q.strides();
  forward.problem.v = v.strides();
  forward.column_stride = transposed_stride(problem.seq_k);
  forward.row_end = problem.seq_q;
  const std::int64_t tiles = TileScheduler::of_head(0, problem.seq_q, variant.rows);
  const int interleaved = interleaved_heads(problem, tiles, std::int64_t{device_properties().num_sms} * 2);
  forward.scheduler = TileScheduler(forward.problem, interleaved, 0, problem.seq_q, variant.rows);
  const auto tile_of = [&](const NearVariant& of) {
    return TileShape{of.rows, common::kSkipKeys, of.dim, is_exact(grouping) ? of.dim : num_groups(problem, grouping)};
  };
  const TileShape tile = tile_of(variant);
  result.tiles = {tile};
  for (const NearVariant* other : variants) {  // those that could take its place
    if (other != &variant) {
      result.tiles.push_back(tile_of(*other));
    }
  }
  result.launches = {{tile, std::int64_t{forward.scheduler.count()}, kThreads, variant.shared_bytes}};
  result.run = [=, launch = variant.launch, caller_k = problem.k](const ForwardTensors& tensors,
                                                                  const Execution& with) {
    NearParameters p = parameters;
    p.forward.problem.mask.data = tensors.mask;
    p.forward.q = q.read(tensors.q, with.workspace, with.stream).data;
    p.forward.v = v.read(tensors.v, with.workspace, with.stream).data;
    p.forward.o = tensors.o;
    p.forward.lse = static_cast<float*>(tensors.lse);
    p.forward.order = tensors.order;
    p.key_means = tensors.key_means;
    p.halves = tensors.halves;
    transpose({tensors.k, caller_k, k_extent}, columns.in(with.workspace), with.stream);
    p.forward.k = columns.in(with.workspace);
    launch(p, with.stream);
  };
  return result;
}

}  // namespace distr::cuda::sm80
