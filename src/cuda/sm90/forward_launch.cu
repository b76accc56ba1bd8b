// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward_launch.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/launch.h"
#include "cuda/prepare/dropped_scores.h"
#include "cuda/prepare/estimate.h"
#include "cuda/prepare/operand.h"
#include "cuda/prepare/transpose.h"
#include "cuda/sm90/constraints.h"
#include "cuda/sm90/heuristics.h"
#include "cuda/sm90/tensor_map.h"

namespace distr::cuda::sm90 {
namespace {

using Variants = std::span<const Variant>;

// What a launch needs of a compiled kernel, but for its rows.
struct KernelRequest {
  ScaleIn scale_in;
  std::int64_t columns;
  KeyLoad load = KeyLoad::tma;
};

// The narrowest shape of so many rows, and blocks an SM, that the problem fits; null: there is none.
[[nodiscard]] const Variant* find(Variants variants, const Problem& problem, const KernelRequest& request,
                                  std::int64_t rows, int blocks = 1) {
  const Variant* found = nullptr;
  for (const Variant& variant : variants) {
    const std::int64_t values =
        has_near_keys(variant.load) ? std::max(problem.head_dim, problem.head_dim_v) : problem.head_dim_v;
    const bool fits = variant.dtype == problem.dtype && variant.scale_in == request.scale_in &&
                      variant.load == request.load && variant.columns >= request.columns && variant.values >= values &&
                      variant.rows == rows && variant.ctas_per_sm == blocks;
    const auto width = [](const Variant& of) { return of.columns + of.values; };
    if (fits && (found == nullptr || width(variant) < width(*found))) {
      found = &variant;
    }
  }
  return found;
}

[[nodiscard]] TileShape tile_of(const Variant& variant) noexcept {
  return {variant.rows, variant.keys, variant.values, variant.columns};
}

// One launch of a kernel.
struct Launch {
  const Variant* variant;
  const Variant* with_lse;  // where LSE is asked for: of as many rows, with the scale in the softmax
  TileScheduler scheduler;
  std::int64_t row_end;
  unsigned next_tile;
  bool is_second;
};

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
  void plan_grouped(Variants variants, const Problem& problem, const Grouping& grouping, std::int64_t row,
                    std::int64_t tile_rows, WorkspaceLayout& workspace);
  [[nodiscard]] std::vector<Launch> launches_of(Variants variants, const Problem& problem, const KernelRequest& request,
                                                std::int64_t begin, std::int64_t end, std::int64_t tile_rows);
  void attend_grouped(const ForwardTensors& tensors, const Operand& q, const Operand& k, const Operand& v,
                      ForwardParameters& p, void* workspace, void* stream) const;
  // q: what scores are made of; far ones, where there are near keys, whose own are of `near_q`.
  void launch(const std::vector<Launch>& launches, ForwardParameters& p, const Operand& q, const Operand& near_q,
              const Operand* k, const Operand& v, void* stream) const;

  DType dtype_;
  ForwardParameters parameters_{};  // but for the pointers and what each launch has
  Input q_, k_, v_;
  std::vector<Launch> exact_, grouped_;
  std::vector<TileShape> tiles_;
  // Of grouped rows:
  Product product_ = Product::precomputed;
  bool scales_ = false;  // q_hat takes the scale in, unless LSE is asked for
  std::optional<Estimates> estimates_;
  Extent q_hat_extent_{}, k_hat_extent_{};
  Part<std::uint16_t> q_hat_;            // or Q~
  Part<std::uint16_t> k_hat_;            // Product::precomputed
  Part<std::uint16_t> keys_transposed_;  // Product::gathered
  Part<float> dropped_;                  // where far scores keep the means of dropped columns
  std::int64_t first_grouped_ = 0;       // row
};

ForwardPlan::ForwardPlan(Variants variants, const Problem& p, const Grouping& grouping, std::int64_t tile_rows,
                         WorkspaceLayout& workspace)
    : dtype_(p.dtype),
      q_(for_tma("Q", p.q, {p.batch, p.heads_q, p.seq_q, p.head_dim}, workspace)),
      k_(for_tma("K", p.k, {p.batch, p.heads_kv, p.seq_k, p.head_dim}, workspace)),
      v_(for_tma("V", p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace)) {
  parameters_.problem = device_problem(p, grouping);
  if (p.batch == 0) {
    return;  // nothing runs
  }
  const std::int64_t exact_rows = common::count_exact_rows(p, grouping);
  if (exact_rows > 0) {
    const KeyLoad load = grouping.skip > 0 ? KeyLoad::near_tma : KeyLoad::tma;
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
  // In bf16 q_hat takes the scale in (ScaleIn), unless LSE is asked for: that rounding would be in it, and a
  // backward that reads it has none. Near scores have none of it either.
  scales_ = p.dtype == DType::bf16 && !sizes.near.has;
  first_grouped_ = row;
  const Groups groups{p.dtype, p.heads_q, sizes.members, sizes.groups};
  const std::array estimations{Estimation{q_.strides(), q_.extent(), sizes.mean ? Estimate::mean : Estimate::first,
                                          grouping.block, row, product_ == Product::spread},
                               Estimation{k_.strides(), k_.extent(), Estimate::sum, p.seq_k, 0, false}};
  q_hat_extent_ = estimations[0].result(groups);
  q_hat_ = Part<std::uint16_t>(workspace, "q_hat", packed_count(q_hat_extent_));
  if (product_ == Product::precomputed) {
    parameters_.keys_of_query_head = true;
    k_hat_extent_ = estimations[1].result(groups);
    k_hat_ = Part<std::uint16_t>(workspace, "k_hat", packed_count(k_hat_extent_));
  } else if (product_ == Product::gathered) {
    keys_transposed_ = Part<std::uint16_t>(workspace, "K^T", transposed_count(k_.extent()));
    parameters_.column_stride = transposed_stride(p.seq_k);
  }
  estimates_.emplace(groups, std::span(estimations).first(product_ == Product::precomputed ? 2 : 1));
  if (sizes.near.has_means) {
    dropped_ = Part<float>(workspace, "scores of dropped columns", p.batch * p.heads_q * p.seq_q);
  }
  const KeyLoad load = product_ == Product::gathered ? (sizes.near.has ? KeyLoad::near_gather : KeyLoad::gather)
                       : product_ == Product::fused  ? KeyLoad::fuse
                       : sizes.near.has              ? KeyLoad::near_tma
                                                     : KeyLoad::tma;
  grouped_ = launches_of(variants, p, {scales_ ? ScaleIn::queries : ScaleIn::softmax, q_hat_extent_.columns, load}, row,
                         p.seq_q, tile_rows);
}

std::vector<Launch> ForwardPlan::launches_of(Variants variants, const Problem& p, const KernelRequest& request,
                                             std::int64_t begin, std::int64_t end, std::int64_t tile_rows) {
  const Variant* const three = find(variants, p, request, kRowsOfThree);
  const Variant* const two = find(variants, p, request, kRowsOfTwo);
  const Variant* const sharing = find(variants, p, request, kRowsOfTwo, 2);
  if (two == nullptr) {  // the library's own serve every size that forward_supports()
    throw Error(Status::unsupported, "no compiled shape takes these sizes");
  }
  const std::int64_t num_sms = device_properties().num_sms;
  const Waves waves{p.batch * p.heads_q, end - begin, p.seq_k, num_sms, p.causal != Causal::none};
  const bool shares =
      sharing != nullptr && sharing->columns == two->columns && tile_rows != kRowsOfThree && waves.is_quicker_sharing();
  const std::int64_t rows_of_three = shares || three == nullptr || tile_rows == kRowsOfTwo ? 0
                                     : tile_rows == kRowsOfThree                           ? end - begin
                                                                                           : waves.rows_for_three();
  std::vector<Launch> result;
  const auto add = [&](const Variant& variant, std::int64_t from, std::int64_t to) {
    const std::int64_t blocks = num_sms * variant.ctas_per_sm;  // that run at the same time
    const int interleaved = interleaved_heads(p, TileScheduler::of_head(from, to, variant.rows), blocks);
    const KernelRequest with_lse{ScaleIn::softmax, request.columns, request.load};
    result.push_back({&variant, find(variants, p, with_lse, variant.rows, variant.ctas_per_sm),
                      TileScheduler(parameters_.problem, interleaved, from, to, variant.rows), to,
                      static_cast<unsigned>(blocks), !result.empty()});
  };
  const std::int64_t middle = begin + rows_of_three;
  if (begin < middle) {
    add(*three, begin, middle);
  }
  if (middle < end) {
    add(shares ? *sharing : *two, middle, end);
  }
  tiles_.clear();
  for (const Variant* variant : {result.front().variant, two, three}) {
    if (variant != nullptr && (tiles_.empty() || tiles_.front().rows != variant->rows)) {
      tiles_.push_back(tile_of(*variant));
    }
  }
  return result;
}

void ForwardPlan::run(const ForwardTensors& tensors, void* workspace, void* stream) const {
  const Operand q = q_.read(tensors.q, workspace, stream);
  const Operand k = k_.read(tensors.k, workspace, stream);
  const Operand v = v_.read(tensors.v, workspace, stream);
  ForwardParameters p = parameters_;
  p.o = tensors.o;
  p.lse = static_cast<float*>(tensors.lse);
  p.order = tensors.order;
  p.halves = tensors.halves;
  if (!exact_.empty()) {
    launch(exact_, p, q, q, &k, v, stream);
  }
  if (!grouped_.empty()) {
    attend_grouped(tensors, q, k, v, p, workspace, stream);
  }
}

void ForwardPlan::attend_grouped(const ForwardTensors& tensors, const Operand& q, const Operand& k, const Operand& v,
                                 ForwardParameters& p, void* workspace, void* stream) const {
  const bool scaled = scales_ && tensors.lse == nullptr;
  const float scale = scaled ? std::exchange(p.problem.scale_log2, 1.0F) : 1.0F;
  const Operand q_hat = packed(q_hat_.in(workspace), q_hat_extent_);
  const Estimates::Tensors of_q{q.data, scale, q_hat_.in(workspace)};
  if (product_ == Product::precomputed) {
    const std::array both{of_q, Estimates::Tensors{k.data, 1, k_hat_.in(workspace)}};
    estimates_->make(tensors.order, both, stream);
    const Operand k_hat = packed(k_hat_.in(workspace), k_hat_extent_);
    launch(grouped_, p, q_hat, q, &k_hat, v, stream);
    return;
  }
  estimates_->make(tensors.order, std::span(&of_q, 1), stream);
  if (dropped_.exists()) {
    dropped_scores(dtype_, p.problem, first_grouped_, q, tensors.order, tensors.key_means, dropped_.in(workspace),
                   stream);
    p.dropped = dropped_.in(workspace);
  }
  if (product_ == Product::gathered) {
    transpose(k, keys_transposed_.in(workspace), stream);
    p.keys_transposed = keys_transposed_.in(workspace);
  }
  launch(grouped_, p, q_hat, q, product_ == Product::gathered ? nullptr : &k, v, stream);
}

void ForwardPlan::launch(const std::vector<Launch>& launches, ForwardParameters& p, const Operand& q,
                         const Operand& near_q, const Operand* k, const Operand& v, void* stream) const {
  constexpr int kConsumerRows = 64;
  const auto map = [&](const Operand& x, int rows, int columns) {
    return tensor_map(x, dtype_, {rows, std::min(columns, 64)});
  };
  for (const Launch& of : launches) {
    if (p.lse != nullptr && of.with_lse == nullptr) {
      throw Error(Status::unsupported, "no compiled shape gives LSE");
    }
    const Variant& variant = p.lse == nullptr ? *of.variant : *of.with_lse;
    p.q = map(q, kConsumerRows, variant.columns);
    if (has_near_keys(variant.load)) {
      p.near_q = map(near_q, kConsumerRows, variant.values);
    }
    if (k != nullptr) {
      p.k = map(*k, variant.keys, variant.load == KeyLoad::fuse ? variant.values : variant.columns);
    }
    p.v = map(v, variant.keys, variant.values);
    p.scheduler = of.scheduler;
    p.row_end = of.row_end;
    p.next_tile = of.next_tile;
    p.is_second = of.is_second;
    variant.launch(p, stream);
  }
}

std::vector<LaunchShape> ForwardPlan::launches() const {
  std::vector<LaunchShape> result;
  for (const auto* launches : {&exact_, &grouped_}) {
    for (const Launch& of : *launches) {
      result.push_back({tile_of(*of.variant), of.scheduler.count(), of.variant->threads, of.variant->shared_bytes});
    }
  }
  return result;
}

// Why another kernel is quicker.
[[nodiscard]] std::string preference(const Problem& problem) {
  return unusable_reason().empty() && leaves_sms_idle(problem, device_properties().num_sms)
             ? "leaves few queries with many keys to sm80/forward, which splits the keys"
             : "";
}

// A thread block's queries have the same near keys.
[[nodiscard]] std::string near_keys_reason(const Problem& problem, const Grouping& grouping) {
  return common::has_near_keys(grouping) && common::near_rows(problem, grouping) % kRowsOfTwo != 0
             ? "takes near keys of blocks of a multiple of 128 rows"
             : "";
}

}  // namespace

std::string forward_supports(const Problem& problem, const Grouping& grouping) {
  if (const std::string reason = unsupported_reason(problem); !reason.empty()) {
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
  if (const std::string reason = unsupported_reason(problem); !reason.empty()) {
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
