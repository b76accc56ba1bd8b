// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backward_launch.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "common/gradient_strides.h"
#include "common/sequence.h"
#include "cuda/launch.h"
#include "cuda/prepare/estimate.h"
#include "cuda/prepare/operand.h"
#include "cuda/prepare/query_rows.h"
#include "cuda/sm90/backward_conversions.h"
#include "cuda/sm90/backward_plan.h"
#include "cuda/sm90/constraints.h"
#include "cuda/sm90/heuristics.h"
#include "cuda/sm90/tensor_map.h"

namespace distr::cuda::sm90 {
namespace {

// The narrowest shape that the problem fits.
[[nodiscard]] const BackwardVariant& find(const Problem& problem, std::int64_t groups) {
  const auto variants = backward_variants();
  return *std::find_if(variants.begin(), variants.end(), [&](const BackwardVariant& variant) {
    return variant.dtype == problem.dtype && variant.columns >= groups && variant.values >= problem.head_dim_v &&
           (variant.caps_scores || problem.softcap == 0) && (variant.takes_lengths || !problem.packed.has_value());
  });
}

[[nodiscard]] std::int64_t whole(std::int64_t rows, std::int64_t tile) { return common::ceil_div(rows, tile) * tile; }

// Packed sequences one behind the other, as if a head were one long sequence.
[[nodiscard]] Problem as_one_sequence(Problem problem) {
  if (problem.packed.has_value()) {
    problem.batch = std::min<std::int64_t>(problem.batch, 1);
    problem.seq_q = problem.packed->total_q;
    problem.seq_k = problem.packed->total_k;
  }
  return problem;
}

constexpr int kMaxColumns = 64;  // of a box

}  // namespace

BackwardPlan::BackwardPlan(const Problem& p, const Grouping& grouping, DqOrder order, WorkspaceLayout& workspace)
    : dtype_(p.dtype),
      factors_(factors_of(p, grouping)),
      variant_(find(p, factors_ == Factors::precomputed ? num_groups(p, grouping) : p.head_dim)),
      has_near_(common::has_near_keys(grouping) && factors_ != Factors::exact),
      queries_{as_one_sequence(p).batch, p.heads_q, as_one_sequence(p).seq_q, p.head_dim},
      heads_(as_one_sequence(p).batch * p.heads_q),
      query_rows_(p.packed ? padded_rows(p.packed->total_q, p.batch) : whole(p.seq_q, kQueryTileRows)),
      key_rows_(p.packed ? padded_rows(p.packed->total_k, p.batch) : whole(p.seq_k, kKeyTileRows)) {
  parameters_.problem = rows_.problem = device_problem(common::without_longer_sequences(p), grouping);
  if (!has_near_) {
    parameters_.problem.near = {};
  }
  rows_.stats_rows = parameters_.stats_rows = stats_rows_of(rows_.problem);
  rows_.layout = StatsLayout::columns;
  if (p.packed.has_value()) {
    rows_.lengths = parameters_.lengths = DeviceLengths(p);
    rows_.padded_rows = parameters_.stats_rows = query_rows_;
  }
  parameters_.key_rows = key_rows_;
  stats_ = {workspace, "rows' statistics", heads_ * parameters_.stats_rows / kStatsTile};
  dq_accum_ = {workspace, "sums of dQ", dq_accum_count(variant_)};
  if (factors_ == Factors::spread) {
    spread_ = {workspace, "spread Q", packed_count(queries_)};
  }
  const auto input = [&](const char* name, const Strides& strides, const Extent& extent) {
    return p.packed ? entries_for_tma(name, strides, extent, workspace) : for_tma(name, strides, extent, workspace);
  };
  const std::int64_t keys = as_one_sequence(p).seq_k;
  if (reads_q()) {
    q_ = input("Q", p.q, queries_);
  }
  k_ = input("K", p.k, {queries_.batch, p.heads_kv, keys, p.head_dim});
  v_ = input("V", p.v, {queries_.batch, p.heads_kv, keys, p.head_dim_v});
  d_o_ = input("dO", p.o, {queries_.batch, p.heads_q, queries_.rows, p.head_dim_v});
  if (has_near_) {
    plan_near(p, grouping, workspace);
  }
  if (order == DqOrder::fixed) {
    semaphores_ = {workspace, "semaphores of dQ", num_launches() * num_semaphores()};
  }
  if (factors_ == Factors::precomputed) {
    const DeviceProblem& sizes = parameters_.problem;
    const Groups groups{p.dtype, p.heads_q, sizes.members, sizes.groups};
    const std::array estimations{
        Estimation{q_.strides(), q_.extent(), sizes.mean ? Estimate::mean : Estimate::first, p.seq_q, 0, false},
        Estimation{k_.strides(), k_.extent(), Estimate::sum, p.seq_k, 0, false}};
    estimates_.emplace(groups, estimations);
    q_hat_extent_ = estimations[0].result(groups);
    k_hat_extent_ = estimations[1].result(groups);
    q_hat_ = {workspace, "q_hat", packed_count(q_hat_extent_)};
    k_hat_ = {workspace, "k_hat", packed_count(k_hat_extent_)};
    parameters_.keys_of_query_head = true;
  }
  plan_key_sums(p, workspace);
  parameters_.scale = static_cast<float>(p.softmax_scale());
  parameters_.score_cap = score_cap_of(p);
  parameters_.d_k_strides = common::gradient_strides(p).k;
  parameters_.d_v_strides = common::gradient_strides(p).v;
  parameters_.interleaved = interleaved_backward_heads(as_one_sequence(p), variant_.columns, variant_.values,
                                                       kKeyTileRows, device_properties().num_sms);
  plan_split(p, workspace);
  conversions_ =
      conversions_of(p, parameters_, factors_, {variant_, near_variant()}, {queries_.batch, query_rows_, key_rows_});
}

void BackwardPlan::plan_near(const Problem& p, const Grouping& grouping, WorkspaceLayout& workspace) {
  if (factors_ == Factors::precomputed) {
    near_variant_ = &find(p, p.head_dim);
  }
  near_dq_accum_ = {workspace, "sums of dQ and dS over near keys", near_dq_accum_count()};
  if (parameters_.problem.near.has_means && p.batch > 0) {  // else nothing runs
    means_.emplace(p, grouping, parameters_.problem, workspace);
  }
}

// Where dK and dV are sums in memory.
void BackwardPlan::plan_key_sums(const Problem& p, WorkspaceLayout& workspace) {
  const bool shared = p.heads_q != p.heads_kv;
  const std::int64_t rows = heads_ * key_rows_;
  if (factors_ == Factors::precomputed || shared) {
    d_k_parts_ = {workspace, "dK of query heads", rows * variant_.columns};
  }
  if (shared) {  // else the launch of far tiles adds what near ones found
    d_v_parts_ = {workspace, "dV of query heads", rows * variant_.values};
  }
  if (near_variant_ != nullptr) {
    near_d_k_parts_ = {workspace, "dK of query heads and near keys", rows * near_variant_->columns};
    near_d_v_parts_ = {workspace, "dV of query heads and near keys", rows * near_variant_->values};
  }
}

void BackwardPlan::plan_split(const Problem& p, WorkspaceLayout& workspace) {
  const KeyBlocks blocks{heads_, key_rows_ / kKeyTileRows, query_rows_ / kQueryTileRows};
  const int sms = device_properties().num_sms;
  const bool are_alike = p.causal == Causal::none && !common::has_window(p) && !p.packed.has_value();
  const bool are_sums = d_k_parts_.exists() || d_v_parts_.exists();  // made by convert_sums()
  parameters_.split = split_last(blocks, sms, are_alike && !are_sums);
  const DeviceProblem& sizes = parameters_.problem;
  const std::int64_t sinks = near_variant_ != nullptr ? sizes.near.sinks : 0;
  const int met = end_query_tile(sizes, sinks * kKeyTileRows) - first_query_tile(sizes, 0);
  near_split_ = split_sinks({blocks.heads, blocks.of_head, met}, sms, sinks);
  const SplitKeys& split = near_split_.pieces > 1 ? near_split_ : parameters_.split;
  if (split.pieces > 1) {
    const std::int64_t rows = split.count(num_blocks(), heads_) * split.pieces * kKeyTileRows;
    d_k_of_pieces_ = {workspace, "dK of pieces", rows * near_variant().columns};
    d_v_of_pieces_ = {workspace, "dV of pieces", rows * near_variant().values};
  }
}

void BackwardPlan::clear(void* workspace, void* stream) const {
  const auto zero = [&](const auto& part, std::int64_t count) {  // of four bytes
    if (part.exists()) {
      check(cudaMemsetAsync(part.in(workspace), 0, static_cast<std::size_t>(count) * 4,
                            static_cast<cudaStream_t>(stream)),
            "cudaMemsetAsync");
    }
  };
  zero(semaphores_, num_launches() * num_semaphores());
  if (has_near_ || !semaphores_.exists()) {
    zero(dq_accum_, dq_accum_count(variant_));
  }
  zero(near_dq_accum_, near_dq_accum_count());
}

void BackwardPlan::run(const BackwardTensors& tensors, void* workspace, void* stream) const {
  const auto read = [&](const Input& input, const void* tensor) {
    const Operand operand = input.read(tensor, workspace, stream);
    return parameters_.lengths.packed ? of_entries(operand) : operand;
  };
  const Operand own_q = reads_q() ? read(q_, tensors.q) : Operand{};
  Operand q = spread_.exists() ? packed(spread_.in(workspace), queries_) : own_q;
  const Operand own_k = read(k_, tensors.k);
  Operand k = own_k;
  const Operand v = read(v_, tensors.v);
  const Operand d_o = read(d_o_, tensors.d_o);
  clear(workspace, stream);  // first, so that nothing stands between the kernels: each starts before the last one ends
  QueryRows rows = with_inputs(rows_, tensors);
  rows.stats = stats_.in(workspace);
  rows.spread = spread_.in(workspace);
  preprocess_rows(dtype_, rows, stream);
  BackwardParameters p = parameters_;
  if (p.lengths.packed) {
    p.lengths.of = tensors.lengths;
  }
  p.v = tensor_map(v, dtype_, {kKeyTileRows, std::min(variant_.values, kMaxColumns)});
  p.d_o = tensor_map(d_o, dtype_, {kQueryTileRows, std::min(variant_.values, kMaxColumns)});
  p.stats = stats_.in(workspace);
  p.dq_accum = dq_accum_.in(workspace);
  if (has_near_) {
    p.near = {tensor_map(own_q, dtype_, {kQueryTileRows, std::min(near_variant().columns, kMaxColumns)}), p.stats,
              near_dq_accum_.in(workspace), means_.has_value()};
  }
  if (estimates_) {
    const std::array both{Estimates::Tensors{q.data, 1, q_hat_.in(workspace)},
                          Estimates::Tensors{k.data, 1, k_hat_.in(workspace)}};
    estimates_->make(tensors.order, both, means_ ? means_->dropped(tensors, workspace) : DroppedScores{}, stream);
    q = packed(q_hat_.in(workspace), q_hat_extent_);
    k = packed(k_hat_.in(workspace), k_hat_extent_);
  }
  if (means_) {
    if (!estimates_) {
      means_->make_dropped(tensors, own_q, workspace, stream);
    }
    means_->run(tensors, p.stats, workspace, stream);
    p.stats = means_->far_stats(workspace);
  }
  p.dq_semaphore = semaphores_.in(workspace);
  p.split.d_k = d_k_of_pieces_.in(workspace);
  p.split.d_v = d_v_of_pieces_.in(workspace);
  std::optional<BackwardParameters> near;
  if (near_variant_ != nullptr) {
    near = parameters_of_near(p, own_k, workspace);
    near_variant_->launch(*near, stream);
    p.tiles = QueryTiles::far;
    p.near.sums_ds = false;
    p.near_d_v = d_v_parts_.exists() ? nullptr : near->d_v_parts;
    p.near_values = near_variant_->values;
    p.near_split = near->split;
    p.dq_semaphore += semaphores_.exists() ? num_semaphores() : 0;
  }
  p.q = tensor_map(q, dtype_, {kQueryTileRows, std::min(variant_.columns, kMaxColumns)});
  p.k = tensor_map(k, dtype_, {kKeyTileRows, std::min(variant_.columns, kMaxColumns)});
  p.ticket = ticket_behind(p.dq_semaphore);
  p.d_k = tensors.d_k;
  p.d_v = tensors.d_v;
  p.d_k_parts = d_k_parts_.in(workspace);
  p.d_v_parts = d_v_parts_.in(workspace);
  variant_.launch(p, stream);
  if (d_k_of_pieces_.exists()) {
    BackwardParameters of_pieces = near.value_or(p);
    of_pieces.d_v_parts = p.near_d_v != nullptr ? nullptr : of_pieces.d_v_parts;  // the launch of far tiles had them
    near_variant().add_pieces(of_pieces, stream);
  }
  convert_all(tensors, workspace, stream);
}

BackwardParameters BackwardPlan::parameters_of_near(BackwardParameters p, const Operand& k, void* workspace) const {
  p.tiles = QueryTiles::near;
  p.k = tensor_map(k, dtype_, {kKeyTileRows, std::min(near_variant_->columns, kMaxColumns)});
  p.keys_of_query_head = false;
  p.ticket = ticket_behind(p.dq_semaphore);
  p.d_k_parts = near_d_k_parts_.in(workspace);
  p.d_v_parts = near_d_v_parts_.in(workspace);
  p.split.sinks = near_split_.sinks;
  p.split.pieces = near_split_.pieces;
  return p;
}

void BackwardPlan::convert_all(const BackwardTensors& tensors, void* workspace, void* stream) const {
  const auto convert = [&](Conversion r, const Part<float>& sums, const Part<float>& near, const std::int32_t* order,
                           void* to) {
    r.packed.lengths.of = tensors.lengths;
    r.sums[0].data = sums.in(workspace);
    r.sums[0].order = order;
    r.sums[1].data = near.in(workspace);
    r.to = to;
    convert_sums(r, stream);
  };
  Conversion of_q = conversions_.q;
  if (means_) {
    of_q.far.of_row = means_->far_rows(workspace);
    of_q.far.means = tensors.key_means;
  }
  convert(of_q, dq_accum_, near_dq_accum_, factors_ == Factors::exact ? nullptr : tensors.order, tensors.d_q);
  if (d_k_parts_.exists()) {
    convert(conversions_.k, d_k_parts_, near_d_k_parts_, factors_ == Factors::precomputed ? tensors.order : nullptr,
            tensors.d_k);
  }
  if (d_v_parts_.exists()) {
    convert(conversions_.v, d_v_parts_, near_d_v_parts_, nullptr, tensors.d_v);
  }
}

std::vector<LaunchShape> BackwardPlan::launches() const {
  std::vector<LaunchShape> result;
  if (near_variant_ != nullptr) {
    result.push_back(near_variant_->shape(near_split_.thread_blocks(num_blocks(), heads_)));
  }
  result.push_back(variant_.shape(parameters_.split.thread_blocks(num_blocks(), heads_)));
  return result;
}

namespace {

KernelPlan<BackwardTensors> plan_with(DqOrder order, const Problem& problem, const Grouping& grouping) {
  KernelPlan<BackwardTensors> result;
  BackwardPlan plan(problem, grouping, order, result.workspace);
  result.launches = plan.launches();
  result.tiles = {result.launches.back().tile};
  result.run = [plan = std::move(plan)](const BackwardTensors& tensors, const Execution& execution) {
    plan.run(tensors, execution.workspace, execution.stream);
  };
  return result;
}

}  // namespace

std::string backward_supports(const Problem& problem, const Grouping& grouping) {
  if (const std::string reason = unsupported_reason(problem, grouping); !reason.empty()) {
    return reason;
  }
  if (problem.seq_q == 0 || (problem.packed.has_value() && problem.packed->total_q == 0)) {
    return "takes at least one query";
  }
  if (const double scale = problem.softmax_scale(); scale < kMinShiftScale || scale > kMaxShiftScale) {
    return "takes scales from 1e-20 to 1e20";
  }
  if (is_by_blocks(problem, grouping) && grouping.block % kConvertedRows != 0) {
    return "takes blocks that 64 divides, or of at least seq_q rows";
  }
  if (const std::string reason = near_keys_reason(problem, grouping); !reason.empty() && !is_exact(grouping)) {
    return reason;
  }
  if (std::string reason = unsupported_device_reason(); !reason.empty()) {
    return reason;
  }
  return has_short_sequences(problem) ? "leaves short packed sequences to sm80/backward" : "";
}

KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping,
                                          const Execution& /*execution*/) {
  return plan_with(DqOrder::fixed, problem, grouping);
}

KernelPlan<BackwardTensors> plan_backward_atomics(const Problem& problem, const Grouping& grouping,
                                                  const Execution& /*execution*/) {
  return plan_with(DqOrder::any, problem, grouping);
}

}  // namespace distr::cuda::sm90
