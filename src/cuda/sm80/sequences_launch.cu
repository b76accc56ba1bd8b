// SPDX-License-Identifier: Apache-2.0
// To this kernel a KV head's queries are heads_q / heads_kv times as many rows, and there are heads_kv heads.
#include "cuda/sm80/sequences_launch.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "common/sequence.h"
#include "cuda/launch.h"
#include "cuda/prepare/operand.h"
#include "cuda/sm80/heuristics.h"
#include "cuda/sm80/variants.h"

namespace distr::cuda::sm80 {
namespace {

[[nodiscard]] std::int64_t heads_of_row(const Problem& problem) { return problem.heads_q / problem.heads_kv; }

// Whether rows of several heads in a tile at least halve the tiles.
[[nodiscard]] bool has_few_rows(const Problem& problem) {
  constexpr std::int64_t kRows = 64;
  const std::int64_t heads = heads_of_row(problem);
  return 2 * common::ceil_div(problem.seq_q * heads, kRows) <= heads * common::ceil_div(problem.seq_q, kRows);
}

[[nodiscard]] std::span<const Variant> sequence_variants(const Problem& problem) {
  return problem.dtype == DType::f16 ? sequence_variants_f16() : sequence_variants_bf16();
}

[[nodiscard]] const Variant& sequence_variant(const Problem& problem) {
  const auto variants = sequence_variants(problem);
  const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  return *std::find_if(variants.begin(), variants.end(), [&](const Variant& variant) { return variant.dim >= dim; });
}

// By the longest lengths there may be. A split takes its share of the keys that there are, so shorter ones leave no SM
// idle that longer ones do not.
[[nodiscard]] SplitSizes sizes_of(const Variant& variant, const Problem& p) {
  const std::int64_t rows = p.seq_q * heads_of_row(p);
  SplitSizes sizes{};
  sizes.tiles = p.batch * p.heads_kv * common::ceil_div(rows, std::int64_t{variant.rows});
  sizes.num_sms = device_properties().num_sms;
  sizes.resident = std::clamp(fitting_ctas(variant.shared_bytes), std::int64_t{1}, std::int64_t{variant.ctas_per_sm});
  sizes.causal = p.causal != Causal::none;
  const std::int64_t keys = common::visible_keys(p, 0, p.seq_q).end;
  sizes.key_tiles = common::ceil_div(keys, std::int64_t{variant.keys});
  if (sizes.causal) {
    const std::int64_t long_rows = p.seq_q + common::causal_offset(p) - keys * 3 / 5;
    sizes.long_tiles =
        p.batch * p.heads_kv *
        common::ceil_div(std::clamp(long_rows, std::int64_t{0}, p.seq_q) * heads_of_row(p), std::int64_t{variant.rows});
  }
  return sizes;
}

class SequencesPlan {
 public:
  SequencesPlan(const Problem& p, const Grouping& grouping, WorkspaceLayout& workspace);
  void run(const ForwardTensors& tensors, void* workspace, void* stream) const;
  [[nodiscard]] LaunchShape launch() const {
    const SplitKv& split = parameters_.split;
    const std::int64_t whole = std::int64_t{parameters_.scheduler.count()} - (split.end - split.begin);
    return {tile_of(variant_), whole + split.ctas(), variant_.threads, variant_.shared_bytes};
  }

 private:
  const Variant& variant_;
  ForwardParameters parameters_{};  // but for the pointers
  Input q_, k_, v_;
  Part<float> partial_o_;
  Part<float2> partial_row_stats_;
  bool dependent_ = false;
};

SequencesPlan::SequencesPlan(const Problem& p, const Grouping& grouping, WorkspaceLayout& workspace)
    : variant_(sequence_variant(p)) {
  const bool packed = p.packed.has_value();
  const auto input = [&](const char* name, Strides strides, Extent extent) {
    strides.batch = packed ? 0 : strides.batch;
    return Input::for_cp_async(name, strides, extent, workspace);
  };
  const std::int64_t batch = packed ? 1 : p.batch;
  const std::int64_t keys = packed ? p.packed->total_k : p.seq_k;
  q_ = input("Q", p.q, {batch, p.heads_q, packed ? p.packed->total_q : p.seq_q, p.head_dim});
  k_ = input("K", p.k, {batch, p.heads_kv, keys, p.head_dim});
  v_ = input("V", p.v, {batch, p.heads_kv, keys, p.head_dim_v});
  DeviceProblem& problem = parameters_.problem;
  problem = device_problem(p, grouping);
  problem.q = q_.strides();
  problem.k = k_.strides();
  problem.v = v_.strides();
  parameters_.heads_of_row = Divisor(static_cast<std::uint32_t>(heads_of_row(p)));
  parameters_.lengths = DeviceLengths(p);
  parameters_.lse_stride = lse_stride(parameters_.lengths, problem);
  parameters_.row_end = p.seq_q * heads_of_row(p);
  DeviceProblem rows = problem;
  rows.heads_q = p.heads_kv;
  const std::int64_t tiles_of_head = TileScheduler::of_head(0, parameters_.row_end, variant_.rows);
  Problem heads = p;
  heads.heads_q = p.heads_kv;
  const SplitSizes sizes = sizes_of(variant_, p);
  parameters_.split = plan_split(sizes);
  dependent_ = sizes.causal || sizes.tiles > sizes.num_sms * sizes.resident;  // as in forward_launch.cu
  const int interleaved = interleaved_heads(heads, tiles_of_head, sizes.num_sms * sizes.resident);
  parameters_.scheduler = TileScheduler(rows, interleaved, 0, parameters_.row_end, variant_.rows);
  const std::int64_t partial_rows = parameters_.split.ctas() * variant_.rows;
  partial_o_ = Part<float>(workspace, "O of splits", partial_rows * variant_.dim);
  partial_row_stats_ = Part<float2>(workspace, "row max and sum of splits", partial_rows);
}

void SequencesPlan::run(const ForwardTensors& tensors, void* workspace, void* stream) const {
  ForwardParameters p = parameters_;
  p.q = q_.read(tensors.q, workspace, stream).data;
  p.k = k_.read(tensors.k, workspace, stream).data;
  p.v = v_.read(tensors.v, workspace, stream).data;
  p.o = tensors.o;
  p.lse = static_cast<float*>(tensors.lse);
  p.lengths.of = tensors.lengths;
  p.split.o = partial_o_.in(workspace);
  p.split.row_stats = partial_row_stats_.in(workspace);
  variant_.launch(p, dependent_, stream);
}

}  // namespace

std::string sequences_supports(const Problem& problem, const Grouping& grouping) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16";
  }
  if (!is_exact(grouping) || problem.mask.kind != MaskKind::none) {
    return "takes exact attention without a mask";
  }
  if (problem.window_left.has_value()) {
    return "takes sliding windows without a left end";
  }
  if (std::string reason = common::reason_against_softcap(problem); !reason.empty()) {
    return reason;
  }
  if (!common::has_lengths(problem) && !has_few_rows(problem)) {
    return "takes lengths that are data, or few rows of query heads that share a KV head";
  }
  if (const int widest = sequence_variants(problem).back().dim;
      std::max(problem.head_dim, problem.head_dim_v) > widest) {
    return "takes head_dim and head_dim_v up to " + std::to_string(widest) +
           (problem.dtype == DType::f16 ? " in f16" : "");
  }
  if (!(problem.softmax_scale() > 0)) {
    return "takes scales above 0";
  }
  if (std::max(problem.seq_q, problem.seq_k) > kMax / 512 ||
      heads_of_row(problem) > kMax / 512 / std::max<std::int64_t>(problem.seq_q, 1)) {
    return "takes sequences up to 4194303, of all query heads that share a KV head";
  }
  return unsupported_grid_reason(problem);
}

KernelPlan<ForwardTensors> plan_sequences(const Problem& problem, const Grouping& grouping,
                                          const Execution& /*execution*/) {
  KernelPlan<ForwardTensors> result;
  SequencesPlan plan(problem, grouping, result.workspace);
  result.launches = {plan.launch()};
  result.tiles = {result.launches.front().tile};
  result.run = [plan = std::move(plan)](const ForwardTensors& tensors, const Execution& with) {
    plan.run(tensors, with.workspace, with.stream);
  };
  return result;
}

}  // namespace distr::cuda::sm80
