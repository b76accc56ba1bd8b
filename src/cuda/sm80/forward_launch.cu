// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/forward_launch.h"

#include <algorithm>
#include <limits>
#include <numbers>
#include <optional>
#include <tuple>
#include <utility>

#include "cuda/launch.h"
#include "cuda/prepare/fuse.h"
#include "cuda/prepare/operand.h"
#include "cuda/prepare/query_rows.h"
#include "cuda/prepare/transpose.h"
#include "cuda/sm80/heuristics.h"
#include "cuda/sm80/near_launch.h"

namespace distr::cuda::sm80 {
namespace {

using Variants = std::span<const Variant>;

// What a call needs of the compiled kernels. Exact kernels serve exact attention, and block 0 of `previous`.
struct KernelRequest {
  std::int64_t dim, groups;
  bool exact, masks;
  std::int64_t members;  // rows of K^T that the kernel adds
  std::int64_t block;    // rows of an order; 0: all

  [[nodiscard]] bool takes(const Variant& variant) const noexcept {
    return variant.dim >= dim && (exact ? variant.groups == variant.dim : variant.groups < variant.dim) &&
           (exact || (variant.groups >= groups && members == variant.members)) && (!masks || variant.masks) &&
           block % variant.rows == 0;
  }
};

// Sums of K's columns for the whole sequence are made once.
[[nodiscard]] bool is_fused_beforehand(const Problem& problem, const Grouping& grouping) noexcept {
  return !is_exact(grouping) && common::members_of(grouping) > 1 && grouping.block >= problem.seq_q;
}

[[nodiscard]] KernelRequest request(const Problem& problem, const Grouping& grouping, bool exact) noexcept {
  return {.dim = std::max(problem.head_dim, problem.head_dim_v),
          .groups = exact ? problem.head_dim : num_groups(problem, grouping),
          .exact = exact,
          .masks = changes_scores(problem) || (problem.window_left.has_value() && common::has_window(problem)),
          .members = is_fused_beforehand(problem, grouping) ? 1 : common::members_of(grouping),
          .block = exact || grouping.block >= problem.seq_q ? 0 : grouping.block};
}

[[nodiscard]] Variants variants_of(DType dtype) { return dtype == DType::f16 ? variants_f16() : variants_bf16(); }

// The least padding, and then the rows that `preferred` wants of a variant.
template <class Preferred>
[[nodiscard]] const Variant* find(Variants variants, const KernelRequest& request, const Preferred& preferred) {
  const auto rank = [&](const Variant& v) { return std::tuple(v.dim, v.groups, v.rows != preferred(v)); };
  const Variant* best = nullptr;
  for (const Variant& variant : variants) {
    if (request.takes(variant) && (best == nullptr || rank(variant) < rank(*best))) {
      best = &variant;
    }
  }
  return best;
}

[[nodiscard]] const Variant* find(Variants variants, const KernelRequest& request) {
  return find(variants, request, [](const Variant& variant) { return variant.rows; });
}

// Whether the groups are other than those that kernels are compiled for, or than those of so small a head dim: then
// q_hat is spread over the d columns, and q_hat k_hat^T = Q~ K^T is the exact kernels' (method, 3).
[[nodiscard]] bool is_spread(Variants variants, const Problem& problem, const Grouping& grouping) {
  if (common::count_exact_rows(problem, grouping) == problem.seq_q) {
    return false;
  }
  const Variant* const grouped = find(variants, request(problem, grouping, false));
  const Variant* const exact = find(variants, request(problem, grouping, true));
  return grouped == nullptr || (exact != nullptr && exact->dim < grouped->dim);
}

// Whether q_hat may take in the scale. bf16 has fp32's exponents, and scales that are usual do not take a product out
// of their range; masks and a window's left end need a row max.
[[nodiscard]] bool can_scale_queries(const Problem& problem) noexcept {
  const double scale_log2 = problem.softmax_scale() * std::numbers::log2e;
  return problem.dtype == DType::bf16 && !changes_scores(problem) && !problem.window_left.has_value() &&
         scale_log2 >= 0x1p-10 && scale_log2 <= 1;
}

// One launch of a kernel: which rows it takes, and which of them are split over the keys.
struct Launch {
  const Variant* variant;
  TileScheduler scheduler;
  std::int64_t row_end;
  SplitKv split;
  bool dependent;

  [[nodiscard]] std::int64_t split_rows() const noexcept { return split.ctas() * variant->rows; }
  [[nodiscard]] std::int64_t blocks() const noexcept {
    return std::int64_t{scheduler.count()} - (split.end - split.begin) + split.ctas();
  }
};

[[nodiscard]] Launch launch_of(const Variant& variant, const Problem& p, const DeviceProblem& sizes,
                               std::int64_t row_begin, std::int64_t row_end) {
  SplitSizes split{};
  const std::int64_t tiles_of_head = TileScheduler::of_head(row_begin, row_end, variant.rows);
  split.tiles = p.batch * p.heads_q * tiles_of_head;
  split.num_sms = device_properties().num_sms;
  split.resident = std::clamp(fitting_ctas(variant.shared_bytes), std::int64_t{1}, std::int64_t{variant.ctas_per_sm});
  const bool windowed = common::has_window(p);  // then tiles of queries see about as many keys each
  split.causal = p.causal != Causal::none && !windowed;
  const common::Band band = common::band_of(p);
  const std::int64_t keys = windowed       ? std::clamp(band.last - band.first + variant.rows, std::int64_t{0}, p.seq_k)
                            : split.causal ? std::clamp(row_end + common::causal_offset(p), std::int64_t{0}, p.seq_k)
                                           : p.seq_k;
  split.key_tiles = common::ceil_div(keys, variant.keys);
  const int interleaved = interleaved_heads(p, tiles_of_head, split.num_sms * split.resident);
  if (split.causal) {  // they are looked at where all tiles run at once, and then all heads are together
    const std::int64_t long_rows = row_end + common::causal_offset(p) - keys * 3 / 5;
    split.long_tiles = p.batch * p.heads_q *
                       common::ceil_div(std::clamp(long_rows, std::int64_t{0}, row_end - row_begin), variant.rows);
  }
  // Blocks that all run at once should be spread evenly over the SMs: not those that are free first.
  const bool dependent = split.causal || split.tiles > split.num_sms * split.resident;
  return {&variant, TileScheduler(sizes, interleaved, row_begin, row_end, variant.rows), row_end, plan_split(split),
          dependent};
}

// What a call does: it is decided here, and run() decides nothing more.
class ForwardPlan {
 public:
  ForwardPlan(Variants variants, const Problem& p, const Grouping& grouping, std::int64_t tile_rows,
              WorkspaceLayout& workspace);

  void run(const ForwardTensors& tensors, void* workspace, void* stream) const;

  // The launch that takes most rows: of several, the last.
  [[nodiscard]] const Launch* main() const noexcept { return grouped_ ? &*grouped_ : exact_ ? &*exact_ : nullptr; }
  [[nodiscard]] std::vector<LaunchShape> launches() const;

 private:
  [[nodiscard]] Operand queries(const ForwardTensors& tensors, void* workspace, void* stream) const;
  void launch(const Launch& of, ForwardParameters& p, void* stream) const {
    p.scheduler = of.scheduler;
    p.row_end = of.row_end;
    p.split.begin = of.split.begin;
    p.split.end = of.split.end;
    p.split.num_splits = of.split.num_splits;
    of.variant->launch(p, of.dependent, stream);
  }

  DType dtype_;
  Strides caller_q_, caller_k_;
  ForwardParameters parameters_{};  // but for the pointers and what each launch has
  std::optional<Launch> exact_, grouped_;
  bool scales_ = false;  // q_hat takes the scale in, unless LSE is asked for
  Input q_, v_;
  Input k_;                       // of exact rows
  Extent k_extent_;               // of grouped rows
  Part<std::uint16_t> spread_;    // Q~, which the kernel's Q then is
  Part<std::uint16_t> columns_;   // K^T
  std::optional<Fusion> fusion_;  // k_hat^T is made beforehand
  Part<std::uint16_t> fused_;
  Part<float> partial_o_;
  Part<float2> partial_row_stats_;
};

ForwardPlan::ForwardPlan(Variants variants, const Problem& p, const Grouping& grouping, std::int64_t tile_rows,
                         WorkspaceLayout& workspace)
    : dtype_(p.dtype), caller_q_(p.q), caller_k_(p.k), k_extent_{p.batch, p.heads_kv, p.seq_k, p.head_dim} {
  const bool spreads = is_spread(variants, p, grouping);
  const Extent q_extent{p.batch, p.heads_q, p.seq_q, p.head_dim};
  q_ = spreads ? Input("Q", packed_strides(q_extent), q_extent, true, workspace)
               : Input::for_cp_async("Q", p.q, q_extent, workspace);
  v_ = Input::for_cp_async("V", p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace);
  if (spreads) {
    spread_ = Part<std::uint16_t>(workspace, "spread Q", packed_count(q_extent));
  }
  parameters_.problem = device_problem(p, grouping);
  parameters_.problem.q = q_.strides();
  parameters_.problem.v = v_.strides();
  const auto launch_for = [&](bool exact, std::int64_t row_begin, std::int64_t row_end) {
    const double scores = scores_per_sm(p, row_begin, row_end, device_properties().num_sms);
    const Variant* const variant = find(variants, request(p, grouping, exact), [&](const Variant& v) -> std::int64_t {
      return tile_rows > 0 ? tile_rows : chosen_rows(v.dim, v.groups, v.members, p.causal != Causal::none, scores);
    });
    if (variant == nullptr) {  // the library's own serve every size that forward_supports()
      throw Error(Status::unsupported, "no compiled shape takes these sizes");
    }
    return launch_of(*variant, p, parameters_.problem, row_begin, row_end);
  };
  const std::int64_t exact_rows = spreads ? p.seq_q : common::count_exact_rows(p, grouping);
  if (exact_rows > 0) {
    exact_ = launch_for(true, 0, exact_rows);
    k_ = Input::for_cp_async("K", p.k, k_extent_, workspace);
    parameters_.problem.k = k_.strides();
  }
  if (exact_rows < p.seq_q) {
    grouped_ = launch_for(false, exact_rows, p.seq_q);
    scales_ = can_scale_queries(p);
    parameters_.column_stride = transposed_stride(p.seq_k);
    columns_ = Part<std::uint16_t>(workspace, "K^T", transposed_count(k_extent_));
    if (is_fused_beforehand(p, grouping)) {
      fusion_ = Fusion{p.dtype,
                       p.batch,
                       p.heads_q,
                       p.heads_kv,
                       p.head_dim,
                       parameters_.column_stride,
                       parameters_.problem.groups,
                       parameters_.problem.members};
      fused_ = Part<std::uint16_t>(workspace, "k_hat^T", fusion_->count());
    }
  }
  std::int64_t rows = 0;  // of partial results; the launches follow each other
  std::int64_t elements = 0;
  for (const auto& launch : {exact_, grouped_}) {
    if (launch) {
      rows = std::max(rows, launch->split_rows());
      elements = std::max(elements, launch->split_rows() * launch->variant->dim);
    }
  }
  partial_o_ = Part<float>(workspace, "O of splits", elements);
  partial_row_stats_ = Part<float2>(workspace, "row max and sum of splits", rows);
}

Operand ForwardPlan::queries(const ForwardTensors& tensors, void* workspace, void* stream) const {
  if (!spread_.exists()) {
    return q_.read(tensors.q, workspace, stream);
  }
  DeviceProblem problem = parameters_.problem;
  problem.q = caller_q_;
  spread_rows(dtype_, problem, tensors.q, tensors.order, spread_.in(workspace), stream);
  return packed(spread_.in(workspace), q_.extent());
}

void ForwardPlan::run(const ForwardTensors& tensors, void* workspace, void* stream) const {
  ForwardParameters p = parameters_;
  p.query_scale = 1;
  p.problem.mask.data = tensors.mask;
  p.q = queries(tensors, workspace, stream).data;
  p.v = v_.read(tensors.v, workspace, stream).data;
  p.o = tensors.o;
  p.lse = static_cast<float*>(tensors.lse);
  p.order = tensors.order;
  p.split.o = partial_o_.in(workspace);
  p.split.row_stats = partial_row_stats_.in(workspace);
  if (exact_) {
    p.k = k_.read(tensors.k, workspace, stream).data;
    launch(*exact_, p, stream);
  }
  if (grouped_) {
    transpose({tensors.k, caller_k_, k_extent_}, columns_.in(workspace), stream);
    p.k = columns_.in(workspace);
    if (fusion_) {
      fuse(columns_.in(workspace), tensors.order, *fusion_, fused_.in(workspace), stream);
      p.k = fused_.in(workspace);
      p.fused = true;
    }
    if (scales_ && p.lse == nullptr) {
      p.scale_in_queries = true;
      p.query_scale = std::exchange(p.problem.scale_log2, 1.0F);
    }
    launch(*grouped_, p, stream);
  }
}

std::vector<LaunchShape> ForwardPlan::launches() const {
  std::vector<LaunchShape> result;
  for (const auto& launch : {exact_, grouped_}) {
    if (launch) {
      const Variant& variant = *launch->variant;
      result.push_back({tile_of(variant), launch->blocks(), variant.threads, variant.shared_bytes});
    }
  }
  return result;
}

// Those that could take the place of `taken`, which is first.
[[nodiscard]] std::vector<TileShape> tiles_beside(const Variant& taken, Variants variants, const Problem& problem,
                                                  const Grouping& grouping) {
  const bool exact = taken.groups == taken.dim;
  const KernelRequest need = request(problem, grouping, exact);
  std::vector<TileShape> tiles{tile_of(taken)};
  for (const Variant& variant : variants) {
    if (need.takes(variant) && variant.dim == taken.dim && variant.groups == taken.groups &&
        variant.rows != taken.rows) {
      tiles.push_back(tile_of(variant));
    }
  }
  return tiles;
}

}  // namespace

std::string forward_supports(const Problem& problem, const Grouping& grouping) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16";
  }
  if (std::max(problem.head_dim, problem.head_dim_v) > 256) {
    return "takes head_dim and head_dim_v up to 256";
  }
  if (!(problem.softmax_scale() > 0)) {
    return "takes scales above 0";
  }
  if (std::max(problem.seq_q, problem.seq_k) > std::numeric_limits<std::int32_t>::max() / 512) {
    return "takes sequences up to 4194303";
  }
  const std::string reason = common::has_near_keys(grouping) ? near_unsupported_reason(problem, grouping) : "";
  return reason.empty() ? unsupported_grid_reason(problem) : reason;
}

KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  if (common::has_near_keys(grouping)) {
    return plan_near_forward(problem, grouping, execution);
  }
  return plan_forward_among(variants_of(problem.dtype), problem, grouping, execution);
}

KernelPlan<ForwardTensors> plan_forward_among(Variants variants, const Problem& problem, const Grouping& grouping,
                                              const Execution& execution) {
  KernelPlan<ForwardTensors> result;
  ForwardPlan plan(variants, problem, grouping, execution.tile_rows, result.workspace);
  result.launches = plan.launches();
  if (const Launch* main = plan.main()) {
    result.tiles = tiles_beside(*main->variant, variants, problem, grouping);
  }
  result.run = [plan = std::move(plan)](const ForwardTensors& tensors, const Execution& with) {
    plan.run(tensors, with.workspace, with.stream);
  };
  return result;
}

}  // namespace distr::cuda::sm80
