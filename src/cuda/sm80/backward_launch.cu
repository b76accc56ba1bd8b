// SPDX-License-Identifier: Apache-2.0
// With Q~ = q_hat spread over the d columns, q_hat k_hat^T = Q~ K^T: the grouped backward is the exact one of Q~, whose
// dQ~ is summed over each group (method, 3). So one pair of kernels serves every grouping.
#include "cuda/sm80/backward_launch.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

#include "common/gradient_strides.h"
#include "common/mask.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/mask_gradient.h"
#include "cuda/prepare/operand.h"
#include "cuda/prepare/query_rows.h"
#include "cuda/sm80/backward_variants.h"
#include "cuda/sm80/heuristics.h"

namespace distr::cuda::sm80 {
namespace {

[[nodiscard]] const BackwardVariant* find(const Problem& problem) {
  const auto variants = problem.dtype == DType::f16 ? backward_variants_f16() : backward_variants_bf16();
  const bool masks = changes_scores(problem);
  const bool window = problem.window_left.has_value() && common::has_window(problem);
  for (const BackwardVariant& variant : variants) {
    if (variant.dim >= std::max(problem.head_dim, problem.head_dim_v) && (variant.masks || !masks) &&
        (variant.windows || !window) && (variant.launch_sequences != nullptr || !problem.packed.has_value())) {
      return &variant;
    }
  }
  return nullptr;
}

// The order in which dQ is summed; any: by atomic additions.
enum class DqOrder : std::uint8_t { fixed, any };

// Whether one kernel can make all gradients. Else two kernels do.
[[nodiscard]] bool can_add_dq(const BackwardVariant& variant) {
  return variant.launch_atomics != nullptr && variant.of_all.shared_bytes <= device_properties().shared_bytes;
}

// Whether one kernel is to make them. tile_rows: the caller's, or 0.
[[nodiscard]] bool adds_dq(const BackwardVariant& variant, const Problem& p, std::int64_t tile_rows) {
  if (!can_add_dq(variant)) {
    return false;
  }
  if (tile_rows > 0) {
    return tile_rows == variant.of_all.rows;
  }
  const std::int64_t ctas = p.batch * p.heads_kv * common::ceil_div(p.seq_k, variant.of_all.keys);
  return adding_dq_pays(variant.dim, common::band_of(p).last != common::kUnlimited, ctas,
                        std::int64_t{variant.of_all.ctas_per_sm} * device_properties().num_sms,
                        supports_dependent_launch());
}

// What a call does: it is decided here, and run() decides nothing more.
class BackwardPlan {
 public:
  BackwardPlan(const Problem& p, const Grouping& grouping, DqOrder order, std::int64_t tile_rows,
               WorkspaceLayout& workspace);

  void run(const BackwardTensors& tensors, void* workspace, void* stream) const;
  [[nodiscard]] std::vector<LaunchShape> launches() const { return launches_of(dq_order_); }
  // All that it has in such an order, the one that it takes first.
  [[nodiscard]] std::vector<TileShape> tiles(DqOrder order) const;

 private:
  [[nodiscard]] std::vector<LaunchShape> launches_of(DqOrder order) const;

  DType dtype_;
  const BackwardVariant& variant_;
  DqOrder dq_order_;
  BackwardParameters parameters_{};  // but for the pointers
  QueryRows rows_{};                 // but for the pointers
  Input q_, k_, v_, d_o_;
  Part<std::uint16_t> spread_;  // Q~, which the kernels' Q then is
  Part<float2> stats_;
  Part<float> delta_;     // wanted by the gradient of a mask
  Part<float> dq_accum_;  // see BackwardParameters; wanted by the atomic additions, and the last part
  std::optional<MaskGradient> mask_gradient_;
};

BackwardPlan::BackwardPlan(const Problem& p, const Grouping& grouping, DqOrder order, std::int64_t tile_rows,
                           WorkspaceLayout& workspace)
    : dtype_(p.dtype),
      variant_(*find(p)),
      dq_order_(order == DqOrder::any && adds_dq(variant_, p, tile_rows) ? DqOrder::any : DqOrder::fixed) {
  const bool packed = p.packed.has_value();
  const std::int64_t batch = packed ? 1 : p.batch;  // of tensors
  const std::int64_t keys = packed ? p.packed->total_k : p.seq_k;
  const Extent queries{batch, p.heads_q, packed ? p.packed->total_q : p.seq_q, p.head_dim};
  const auto input = [&](const char* name, Strides strides, const Extent& extent) {
    strides.batch = packed ? 0 : strides.batch;
    return Input::for_cp_async(name, strides, extent, workspace);
  };
  DeviceProblem& problem = parameters_.problem;
  problem = device_problem(p, grouping);
  rows_.problem = problem;
  rows_.lengths = parameters_.lengths = DeviceLengths(p);
  rows_.stats_rows = parameters_.stats_rows = stats_rows_of(problem);
  if (packed) {
    rows_.padded_rows = parameters_.stats_rows = padded_rows(p.packed->total_q, p.batch);
  }
  stats_ = Part<float2>(workspace, "rows' statistics", batch * p.heads_q * parameters_.stats_rows);
  k_ = input("K", p.k, {batch, p.heads_kv, keys, p.head_dim});
  v_ = input("V", p.v, {batch, p.heads_kv, keys, p.head_dim_v});
  d_o_ = input("dO", p.o, {batch, p.heads_q, queries.rows, p.head_dim_v});
  if (is_exact(grouping)) {
    q_ = input("Q", p.q, queries);
    problem.q = q_.strides();
  } else {
    spread_ = Part<std::uint16_t>(workspace, "spread Q", packed_count(queries));
    problem.q = packed_strides(queries);
  }
  problem.k = k_.strides();
  problem.v = v_.strides();
  problem.o = d_o_.strides();
  if (p.mask.kind == MaskKind::additive) {
    delta_ = Part<float>(workspace, "D", p.batch * p.heads_q * p.seq_q);
    mask_gradient_.emplace(p, grouping);
  }
  if (dq_order_ == DqOrder::any) {
    dq_accum_ = Part<float>(workspace, "sums of dQ", p.batch * p.heads_q * rows_.stats_rows * variant_.dim);
  }
  parameters_.scale = static_cast<float>(p.softmax_scale());
  const auto [d_q, d_k, d_v] = common::gradient_strides(p);
  parameters_.d_q_strides = d_q;
  parameters_.d_k_strides = d_k;
  parameters_.d_v_strides = d_v;
}

void BackwardPlan::run(const BackwardTensors& tensors, void* workspace, void* stream) const {
  QueryRows rows = with_inputs(rows_, tensors);
  rows.stats = stats_.in(workspace);
  rows.delta = delta_.in(workspace);
  rows.spread = spread_.in(workspace);
  preprocess_rows(dtype_, rows, stream);

  BackwardParameters p = parameters_;
  p.problem.mask.data = tensors.mask;
  p.q = spread_.exists() ? rows.spread : q_.read(tensors.q, workspace, stream).data;
  p.k = k_.read(tensors.k, workspace, stream).data;
  p.v = v_.read(tensors.v, workspace, stream).data;
  p.d_o = d_o_.read(tensors.d_o, workspace, stream).data;
  p.stats = stats_.in(workspace);
  p.dq_accum = dq_accum_.in(workspace);
  p.order = tensors.order;
  p.d_q = tensors.d_q;
  p.d_k = tensors.d_k;
  p.d_v = tensors.d_v;
  p.lengths.of = tensors.lengths;
  (p.lengths.packed              ? variant_.launch_sequences
   : dq_order_ == DqOrder::fixed ? variant_.launch
                                 : variant_.launch_atomics)(p, stream);
  if (tensors.d_mask != nullptr && mask_gradient_) {
    mask_gradient_->write(tensors, rows.delta, stream);
  }
}

std::vector<LaunchShape> BackwardPlan::launches_of(DqOrder order) const {
  const DeviceProblem& p = parameters_.problem;
  const auto of = [&](const BackwardShape& shape, std::int64_t tiles) {
    return LaunchShape{
        {shape.rows, shape.keys, variant_.dim, p.groups}, tiles * shape.parts, shape.threads, shape.shared_bytes};
  };
  const auto over_keys = [&](const BackwardShape& shape) {
    return of(shape, p.batch * p.heads_kv * common::ceil_div(p.seq_k, shape.keys));
  };
  const auto over_queries = [&](const BackwardShape& shape) {
    return of(shape, p.batch * p.heads_q * common::ceil_div(p.seq_q, shape.rows));
  };
  if (order == DqOrder::fixed) {
    return {over_queries(variant_.of_queries), over_keys(variant_.of_keys)};
  }
  BackwardShape convert = variant_.convert;
  convert.shared_bytes = p.exact ? 0 : convert.shared_bytes;
  return {over_keys(variant_.of_all), over_queries(convert)};
}

std::vector<TileShape> BackwardPlan::tiles(DqOrder order) const {
  std::vector<TileShape> result{launches().front().tile};
  if (order == DqOrder::any && can_add_dq(variant_)) {
    result.push_back(launches_of(dq_order_ == DqOrder::any ? DqOrder::fixed : DqOrder::any).front().tile);
  }
  return result;
}

KernelPlan<BackwardTensors> plan_with(DqOrder order, const Problem& problem, const Grouping& grouping,
                                      const Execution& with) {
  KernelPlan<BackwardTensors> result;
  BackwardPlan plan(problem, grouping, order, with.tile_rows, result.workspace);
  result.launches = plan.launches();
  result.tiles = plan.tiles(order);
  result.run = [plan = std::move(plan)](const BackwardTensors& tensors, const Execution& execution) {
    plan.run(tensors, execution.workspace, execution.stream);
  };
  return result;
}

}  // namespace

std::string backward_supports(const Problem& problem, const Grouping& grouping) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16";
  }
  if (!(problem.softmax_scale() > 0)) {
    return "takes scales above 0";
  }
  if (common::has_lengths(problem) && problem.window_left.has_value()) {
    return "takes lengths that are data without a sliding window's left end";
  }
  if (common::has_lengths(problem) && problem.softcap != 0) {
    return "takes lengths that are data where scores are not capped";
  }
  if (find(problem) == nullptr) {
    return problem.packed.has_value() ? "takes packed sequences in bf16, of head_dim and head_dim_v up to 128"
                                      : "takes head_dim and head_dim_v up to 256";
  }
  if (std::max(problem.seq_q, problem.seq_k) > std::numeric_limits<std::int32_t>::max() / 512) {
    return "takes sequences up to 4194303";
  }
  // As double: int64 could overflow.
  const double rows = static_cast<double>(problem.batch) * static_cast<double>(problem.heads_q) *
                      static_cast<double>((problem.seq_q + kStatsRows - 1) / kStatsRows * kStatsRows);
  if (rows / kPreprocessedRows > std::numeric_limits<std::int32_t>::max()) {
    return "takes up to 68719476704 rows of Q, each head's up to a multiple of 128";
  }
  return MaskGradient::unsupported_reason(problem, grouping);  // the other grids are no larger
}

KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping,
                                          const Execution& execution) {
  return plan_with(DqOrder::fixed, problem, grouping, execution);
}

KernelPlan<BackwardTensors> plan_backward_atomics(const Problem& problem, const Grouping& grouping,
                                                  const Execution& execution) {
  return plan_with(DqOrder::any, problem, grouping, execution);
}

}  // namespace distr::cuda::sm80
