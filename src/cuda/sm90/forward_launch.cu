// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward_launch.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "common/sequence.h"
#include "cuda/launch.h"
#include "cuda/prepare/estimate.h"
#include "cuda/prepare/operand.h"
#include "cuda/prepare/transpose.h"
#include "cuda/sm90/constraints.h"
#include "cuda/sm90/heuristics.h"
#include "cuda/sm90/launches.h"
#include "cuda/sm90/tensor_map.h"

namespace distr::cuda::sm90 {
namespace {

using Variants = std::span<const Variant>;

// What a call does: it is decided here, and run() decides nothing more.
class ForwardPlan {
 public:
  ForwardPlan(Variants variants, const Problem& problem, const Grouping& grouping, std::int64_t tile_rows,
              WorkspaceLayout& workspace);

  void run(const ForwardTensors& tensors, void* workspace, void* stream) const;
  [[nodiscard]] std::vector<LaunchShape> launches() const;
  // Of the last launches' kernels; first is the one that takes the first rows.
  [[nodiscard]] const std::vector<TileShape>& tiles() const noexcept { return tiles_; }

 private:
  void plan_near(Variants variants, const Problem& problem, std::int64_t columns, std::int64_t row,
                 WorkspaceLayout& workspace);
  void plan_grouped(Variants variants, const Problem& problem, const Grouping& grouping, std::int64_t row,
                    std::int64_t tile_rows, WorkspaceLayout& workspace);
  [[nodiscard]] std::vector<Launch> launches_of(Variants variants, const Problem& problem, const KernelRequest& request,
                                                std::int64_t begin, std::int64_t end, std::int64_t tile_rows);
  void attend_near(const Operand& q, const Operand& k, const Operand& v, ForwardParameters& p, void* workspace,
                   void* stream) const;
  void attend_grouped(const ForwardTensors& tensors, const Operand& q, const Operand& k, const Operand& v,
                      ForwardParameters& p, void* workspace, void* stream) const;

  DType dtype_;
  ForwardParameters parameters_{};  // but for the pointers and what each launch has
  Input q_, k_, v_;
  std::vector<Launch> exact_, grouped_;
  std::vector<Launch> near_far_;    // near keys, and then far ones; else, or with LSE where it gives none:
  std::vector<Launch> near_, far_;  // near ones, and by another launch far ones
  std::vector<TileShape> tiles_;
  Part<std::uint16_t> keys_transposed_;  // where keys are gathered
  Part<float> near_o_;                   // of near keys
  Part<float2> near_stats_;
  // Of grouped rows:
  Product product_ = Product::precomputed;
  bool scales_ = false;  // q_hat takes the scale in, unless LSE is asked for
  std::optional<Estimates> estimates_;
  Extent q_hat_extent_{}, k_hat_extent_{};
  Part<std::uint16_t> q_hat_;  // or Q~
  Part<std::uint16_t> k_hat_;  // Product::precomputed
  Part<float> dropped_;        // where far scores keep the means of dropped columns
};

ForwardPlan::ForwardPlan(Variants variants, const Problem& p, const Grouping& grouping, std::int64_t tile_rows,
                         WorkspaceLayout& workspace)
    : dtype_(p.dtype) {
  const bool packed = p.packed.has_value();
  const auto input = [&](const char* name, const Strides& strides, std::int64_t heads, std::int64_t rows,
                         std::int64_t columns) {
    const Extent extent{packed ? 1 : p.batch, heads, rows, columns};
    return common::has_lengths(p) ? entries_for_tma(name, strides, extent, workspace)
                                  : for_tma(name, strides, extent, workspace);
  };
  q_ = input("Q", p.q, p.heads_q, packed ? p.packed->total_q : p.seq_q, p.head_dim);
  k_ = input("K", p.k, p.heads_kv, packed ? p.packed->total_k : p.seq_k, p.head_dim);
  v_ = input("V", p.v, p.heads_kv, packed ? p.packed->total_k : p.seq_k, p.head_dim_v);
  parameters_.problem = device_problem(common::without_longer_sequences(p), grouping);
  parameters_.score_cap = score_cap_of(p);
  if (common::has_lengths(p)) {
    parameters_.lengths = DeviceLengths(p);
    const auto between = [](const Input& of) {
      return static_cast<std::int32_t>(entry_rows(of.extent(), of.strides()));
    };
    parameters_.entry_rows = {between(k_), between(v_)};
  }
  if (p.batch == 0 || (packed && p.packed->total_q == 0)) {
    return;  // nothing runs
  }
  const std::int64_t exact_rows = common::count_exact_rows(p, grouping);
  if (exact_rows > 0) {
    const KeyLoad load = !parameters_.problem.near.skips  ? KeyLoad::tma
                         : votes_by_one_set_of_queries(p) ? KeyLoad::voted_exact
                                                          : KeyLoad::voted;
    exact_ = launches_of(variants, p, {ScaleIn::softmax, p.head_dim, load}, 0, exact_rows, tile_rows);
  }
  if (exact_rows < p.seq_q) {
    plan_grouped(variants, p, grouping, exact_rows, tile_rows, workspace);
  }
}

// The rows from `row` on, by their groupings.
void ForwardPlan::plan_grouped(Variants variants, const Problem& p, const Grouping& grouping, std::int64_t row,
                               std::int64_t tile_rows, WorkspaceLayout& workspace) {
  const DeviceProblem& sizes = parameters_.problem;
  product_ = product_of(p, grouping);
  const Groups groups{p.dtype, p.heads_q, sizes.members, sizes.groups};
  const Estimation of_q{q_.strides(),   q_.extent(), sizes.mean ? Estimate::mean : Estimate::first,
                        grouping.block, row,         product_ == Product::spread};
  std::vector<Estimation> estimations{of_q};
  q_hat_extent_ = of_q.result(groups);
  q_hat_ = Part<std::uint16_t>(workspace, "q_hat", packed_count(q_hat_extent_));
  if (product_ == Product::precomputed) {
    parameters_.keys_of_query_head = true;
    estimations.push_back({k_.strides(), k_.extent(), Estimate::sum, p.seq_k, 0, false});
    k_hat_extent_ = estimations.back().result(groups);
    k_hat_ = Part<std::uint16_t>(workspace, "k_hat", packed_count(k_hat_extent_));
  } else if (product_ == Product::gathered) {
    keys_transposed_ = Part<std::uint16_t>(workspace, "K^T", transposed_count(k_.extent()));
    parameters_.column_stride = transposed_stride(p.seq_k);
  }
  estimates_.emplace(groups, estimations);
  if (sizes.near.has_means) {
    dropped_ = Part<float>(workspace, "scores of dropped columns", p.batch * p.heads_q * p.seq_q);
  }
  const std::int64_t columns = q_hat_extent_.columns;
  if (sizes.near.skips) {
    const KeyLoad load = product_ == Product::precomputed ? KeyLoad::voted_grouped : KeyLoad::voted;
    near_far_ = launches_of(variants, p, {ScaleIn::softmax, columns, load}, row, p.seq_q, tile_rows);
    return;
  }
  if (sizes.near.has) {
    plan_near(variants, p, columns, row, workspace);
    return;
  }
  const KeyLoad load = product_ == Product::gathered ? KeyLoad::gather
                       : product_ == Product::fused  ? KeyLoad::fuse
                                                     : KeyLoad::tma;
  // In bf16 q_hat takes the scale in (ScaleIn), unless LSE is asked for: that rounding would be in it, and a backward
  // that reads it has none.
  scales_ = p.dtype == DType::bf16;
  grouped_ =
      launches_of(variants, p, {scales_ ? ScaleIn::queries : ScaleIn::softmax, columns, load}, row, p.seq_q, tile_rows);
}

// The rows from `row` on, which have near keys and skip nothing. columns: of what far scores are made of.
void ForwardPlan::plan_near(Variants variants, const Problem& p, std::int64_t columns, std::int64_t row,
                            WorkspaceLayout& workspace) {
  const bool gathers = product_ == Product::gathered;
  // The one shape for k_hat that was made beforehand has the scale in the softmax, and so serves calls with LSE, too.
  const bool scales = product_ != Product::precomputed;
  const KernelRequest request{scales ? ScaleIn::queries : ScaleIn::softmax, columns,
                              gathers ? KeyLoad::runs_gather : KeyLoad::runs_tma};
  if (has_near_far_shape(variants, p, request)) {
    scales_ = scales;
    near_far_ = launches_of(variants, p, request, row, p.seq_q, kRowsOfTwo);
    if (near_far_.front().with_lse != nullptr) {
      return;
    }
  }
  if (product_ == Product::precomputed) {  // lists take K's heads
    throw Error(Status::unsupported, "no compiled shape takes these sizes");
  }
  near_ = launches_of(variants, p, {ScaleIn::softmax, p.head_dim, KeyLoad::listed_tma}, row, p.seq_q, kRowsOfTwo);
  const std::int64_t rows = p.batch * p.heads_q * p.seq_q;
  near_o_ = Part<float>(workspace, "O of near keys", rows * near_.front().variant->values);
  near_stats_ = Part<float2>(workspace, "row max and sum of near keys", rows);
  far_ = launches_of(variants, p, {ScaleIn::softmax, columns, gathers ? KeyLoad::listed_gather : KeyLoad::listed_tma},
                     row, p.seq_q, kRowsOfTwo);
}

std::vector<Launch> ForwardPlan::launches_of(Variants variants, const Problem& p, const KernelRequest& request,
                                             std::int64_t begin, std::int64_t end, std::int64_t tile_rows) {
  Launches launches = sm90::launches_of(variants, p, parameters_.problem, request, begin, end, tile_rows);
  tiles_ = std::move(launches.tiles);
  return std::move(launches.list);
}

void ForwardPlan::run(const ForwardTensors& tensors, void* workspace, void* stream) const {
  Operand q = q_.read(tensors.q, workspace, stream);
  Operand k = k_.read(tensors.k, workspace, stream);
  Operand v = v_.read(tensors.v, workspace, stream);
  ForwardParameters p = parameters_;
  p.lengths.of = tensors.lengths;
  if (p.lengths.exist()) {
    q = p.lengths.packed ? of_entries(q) : q;
    k = of_entries(k);
    v = of_entries(v);
  }
  p.o = tensors.o;
  p.lse = static_cast<float*>(tensors.lse);
  p.order = tensors.order;
  p.listed.halves = tensors.halves;
  if (keys_transposed_.exists()) {
    transpose(k, keys_transposed_.in(workspace), stream);
    p.keys_transposed = keys_transposed_.in(workspace);
  }
  if (!exact_.empty()) {
    // Where far keys have queries of their own, they are the same, and nothing is left to finish.
    const bool finishes = std::exchange(p.problem.near.finishes, false);
    const FarOperands far{q, nullptr};
    const bool has_far_queries = exact_.front().variant->load == KeyLoad::voted;
    run_launches(exact_, dtype_, p, q, &k, v, has_far_queries ? &far : nullptr, stream);
    p.problem.near.finishes = finishes;
  }
  if (estimates_) {
    attend_grouped(tensors, q, k, v, p, workspace, stream);
  }
}

void ForwardPlan::attend_near(const Operand& q, const Operand& k, const Operand& v, ForwardParameters& p,
                              void* workspace, void* stream) const {
  ListedKeys& listed = p.listed;
  listed.set = KeySet::near;
  listed.near.o = near_o_.in(workspace);
  listed.near.stats = near_stats_.in(workspace);
  run_launches(near_, dtype_, p, q, &k, v, nullptr, stream);
  listed.set = KeySet::far;
}

void ForwardPlan::attend_grouped(const ForwardTensors& tensors, const Operand& q, const Operand& k, const Operand& v,
                                 ForwardParameters& p, void* workspace, void* stream) const {
  const bool with_lse = tensors.lse != nullptr;
  const bool by_one_launch = !near_far_.empty() && (!with_lse || near_far_.front().with_lse != nullptr);
  p.listed.near_scale_log2 = p.problem.scale_log2;
  if (!by_one_launch && !near_.empty()) {
    attend_near(q, k, v, p, workspace, stream);
  }
  const bool scaled = scales_ && !with_lse;
  const float scale = scaled ? std::exchange(p.problem.scale_log2, 1.0F) : 1.0F;
  const Operand q_hat = packed(q_hat_.in(workspace), q_hat_extent_);
  const Operand k_hat = packed(k_hat_.in(workspace), k_hat_extent_);
  std::vector<Estimates::Tensors> estimated{{q.data, scale, q_hat_.in(workspace)}};
  if (k_hat_.exists()) {
    estimated.push_back({k.data, 1, k_hat_.in(workspace)});
  }
  estimates_->make(tensors.order, estimated,
                   {tensors.key_means, dropped_.in(workspace), static_cast<unsigned>(p.problem.heads_kv),
                    static_cast<unsigned>(p.problem.near.means), true, p.problem},
                   stream);
  p.listed.dropped = dropped_.in(workspace);
  const Operand* const keys = product_ == Product::precomputed ? &k_hat : product_ == Product::gathered ? nullptr : &k;
  if (by_one_launch) {
    const bool has_keys = !p.problem.near.skips || product_ == Product::precomputed;  // else K is there already
    const FarOperands far{q_hat, has_keys ? keys : nullptr};
    run_launches(near_far_, dtype_, p, q, &k, v, &far, stream);
  } else {
    run_launches(near_.empty() ? grouped_ : far_, dtype_, p, q_hat, keys, v, nullptr, stream);
  }
}

std::vector<LaunchShape> ForwardPlan::launches() const {
  std::vector<LaunchShape> result;
  const bool by_one_launch = !near_far_.empty();  // as a call without LSE is; one with LSE has the same tiles
  for (const auto* launches : {&exact_, &grouped_, &near_far_, &near_, &far_}) {
    if (by_one_launch && (launches == &near_ || launches == &far_)) {
      continue;
    }
    std::transform(launches->begin(), launches->end(), std::back_inserter(result), shape_of);
  }
  return result;
}

// Why another kernel is quicker.
[[nodiscard]] std::string preference(const Problem& problem) {
  if (common::has_lengths(problem) && (problem.window_left.has_value() || problem.softcap != 0)) {
    return "";  // the plain kernels alone take them
  }
  if (has_few_rows(problem)) {
    return "leaves few rows of sequences whose lengths are data to sm80/sequences";
  }
  if (!unusable_reason().empty() || !leaves_sms_idle(problem, device_properties().num_sms)) {
    return "";
  }
  return std::string("leaves few queries with many keys to ") +
         (common::has_lengths(problem) ? "sm80/sequences" : "sm80/forward") + ", which splits the keys";
}

}  // namespace

std::string forward_supports(const Problem& problem, const Grouping& grouping) {
  if (const std::string reason = unsupported_reason(problem, grouping); !reason.empty()) {
    return reason;
  }
  if (const std::string reason = near_keys_reason(problem, grouping); !reason.empty()) {
    return reason;
  }
  if (is_by_blocks(problem, grouping)) {
    return "takes one grouping for the whole sequence: blocks of at least seq_q rows";
  }
  const std::string reason = unsupported_device_reason();
  return reason.empty() ? preference(problem) : reason;
}

std::string forward_blocks_supports(const Problem& problem, const Grouping& grouping) {
  if (const std::string reason = unsupported_reason(problem, grouping); !reason.empty()) {
    return reason;
  }
  if (const std::string reason = near_keys_reason(problem, grouping); !reason.empty()) {
    return reason;
  }
  if (!is_by_blocks(problem, grouping)) {
    return "takes groupings of blocks of less than seq_q rows";
  }
  constexpr int kEstimatedRows = 64;  // at a time
  if (grouping.block % kEstimatedRows != 0) {
    return "takes blocks of a multiple of 64 rows";
  }
  const std::string reason = unsupported_device_reason();
  return reason.empty() ? preference(problem) : reason;
}

KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  return plan_forward_among(variants(), problem, grouping, execution);
}

KernelPlan<ForwardTensors> plan_forward_among(Variants variants, const Problem& problem, const Grouping& grouping,
                                              const Execution& execution) {
  KernelPlan<ForwardTensors> result;
  ForwardPlan plan(variants, problem, grouping, execution.tile_rows, result.workspace);
  result.launches = plan.launches();
  result.tiles = plan.tiles();
  result.run = [plan = std::move(plan)](const ForwardTensors& tensors, const Execution& with) {
    plan.run(tensors, with.workspace, with.stream);
  };
  return result;
}

}  // namespace distr::cuda::sm90
