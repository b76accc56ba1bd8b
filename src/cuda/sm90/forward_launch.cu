// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward_launch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "cuda/launch.h"
#include "cuda/other_variants.h"
#include "cuda/prepare.h"
#include "cuda/sm90/estimate.h"
#include "cuda/sm90/refusal.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/variants.h"

namespace distr::cuda::sm90 {
namespace {

// How long a launch takes, in rows of a block of two consumers. Blocks of a causal launch end one by one; others in
// waves. With three consumers a row costs less (docs/kernel-log.md, sm90/forward, step 18).
[[nodiscard]] double cost(const Problem& problem, const Variant& variant) {
  constexpr double kThreeConsumers = 0.96;
  const std::int64_t blocks =
      problem.batch * problem.heads_q * common::ceil_div(problem.seq_q, std::int64_t{variant.rows});
  const double waves = static_cast<double>(blocks) / device_properties().processors;
  const double row = variant.rows > 128 ? kThreeConsumers : 1;
  return (problem.causal == Causal::none ? std::ceil(waves) : waves) * variant.rows * row;
}

// The quickest of the narrowest shapes that the problem fits. `members`: Config's kMembers.
[[nodiscard]] const Variant& find(const Problem& problem, Scores scores, std::int64_t groups, int members) {
  const Variant* found = nullptr;
  for (const Variant& variant : OtherVariants<Variant>::or_else(variants())) {
    if (variant.dtype != problem.dtype || variant.scores != scores || variant.members != members ||
        variant.columns < groups || variant.values < problem.head_dim_v) {
      continue;
    }
    const auto width = [](const Variant& of) { return of.columns + of.values; };
    if (found == nullptr || width(variant) < width(*found) ||
        (width(variant) == width(*found) && cost(problem, variant) < cost(problem, *found))) {
      found = &variant;
    }
  }
  return *found;
}

// The tensors as the kernel reads them, and room for what is made of them.
struct Operands {
  Operand q, k, v;
  void* q_hat = nullptr;
  void* k_hat = nullptr;            // of one grouping for the whole sequence
  void* keys_transposed = nullptr;  // where blocks have groupings of their own

  Operands(const Problem& p, const Grouping& grouping, Workspace& workspace)
      : q(copied(p.q, {p.batch, p.heads_q, p.seq_q, p.head_dim}, workspace)),
        k(copied(p.k, {p.batch, p.heads_kv, p.seq_k, p.head_dim}, workspace)),
        v(copied(p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace)) {
    if (common::count_exact_rows(p, grouping) == p.seq_q) {
      return;
    }
    const std::int64_t groups = num_groups(p, grouping);
    q_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_q, groups}));
    if (is_by_blocks(p, grouping)) {
      const std::int64_t rows = p.batch * p.heads_kv * (p.head_dim + 1);
      keys_transposed = workspace.take<std::uint16_t>(rows * column_stride(p.seq_k));
    } else {
      k_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_k, groups}));
    }
  }
};

// One call of run_forward().
class Call {
 public:
  Call(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const Execution& execution)
      : problem_(problem),
        grouping_(grouping),
        tensors_(tensors),
        stream_(execution.stream),
        workspace_(execution.workspace),
        operands_(problem, grouping, workspace_) {
    operands_.q.read(tensors.q, "Q", stream_);
    operands_.k.read(tensors.k, "K", stream_);
    operands_.v.read(tensors.v, "V", stream_);
    p_.problem = device_problem(problem, grouping, nullptr);
    p_.o = tensors.o;
    p_.lse = static_cast<float*>(tensors.lse);
    p_.section = heads_in_cache(problem);
    p_.order = tensors.order;
  }

  void attend_exactly(std::int64_t rows) {
    p_.row_begin = 0;
    p_.row_end = rows;
    launch(find(problem_, Scores::raw, problem_.head_dim, 0), operands_.q, &operands_.k);
  }

  // The rows from `row` on, by their groupings.
  void attend_grouped(std::int64_t row) {
    p_.row_begin = row;
    p_.row_end = problem_.seq_q;
    // In bf16 q_hat takes the scale in (Config's Scores), unless LSE is asked for: that rounding would be in it, and a
    // backward that reads it has none.
    const bool scaled = problem_.dtype == DType::bf16 && tensors_.lse == nullptr;
    const float scale = scaled ? std::exchange(p_.problem.scale_log2, 1.0F) : 1.0F;
    const auto of = [&](Estimate kind, std::int64_t block, std::int64_t first_row, float factor) {
      const DeviceProblem& p = p_.problem;
      return Estimation{problem_.dtype, kind, p.heads_q, block, first_row, p.groups, p.members, factor};
    };
    const Operand q = estimated(operands_.q, tensors_.order,
                                of(p_.problem.mean ? Estimate::mean : Estimate::first, grouping_.block, row, scale),
                                operands_.q_hat, stream_);
    const auto variant = [&](int members) -> const Variant& {
      return find(problem_, scaled ? Scores::logarithms : Scores::raw, p_.problem.groups, members);
    };
    if (is_by_blocks(problem_, grouping_)) {
      const Operand& k = operands_.k;
      transpose(k.data, k.strides, k.extent, operands_.keys_transposed, stream_);
      p_.keys_transposed = operands_.keys_transposed;
      p_.column_stride = column_stride(problem_.seq_k);
      launch(variant(p_.problem.members), q, nullptr);
    } else {
      p_.keys_of_query_head = true;
      const Operand k =
          estimated(operands_.k, tensors_.order, of(Estimate::sum, problem_.seq_k, 0, 1), operands_.k_hat, stream_);
      launch(variant(0), q, &k);
    }
  }

 private:
  void launch(const Variant& variant, const Operand& q, const Operand* k) {
    const auto map = [&](const Operand& x, int rows, int columns) {
      return tensor_map(x, problem_.dtype, {rows, std::min(columns, 64)});
    };
    constexpr int kConsumerRows = 64;
    p_.q = map(q, kConsumerRows, variant.columns);
    if (k != nullptr) {
      p_.k = map(*k, variant.keys, variant.columns);
    }
    p_.v = map(operands_.v, variant.keys, variant.values);
    variant.launch(p_, stream_);
  }

  const Problem& problem_;
  const Grouping& grouping_;
  const ForwardTensors& tensors_;
  void* stream_;
  Workspace workspace_;
  Operands operands_;
  ForwardParameters p_{};
};

// Why another kernel is quicker.
[[nodiscard]] std::string preference(const Problem& problem) {
  if (!unusable_reason().empty()) {
    return {};
  }
  constexpr std::int64_t kManyKeys = 2048;
  const std::int64_t tiles = problem.batch * problem.heads_q * common::ceil_div(problem.seq_q, std::int64_t{128});
  return 4 * tiles < device_properties().processors && problem.seq_k > kManyKeys
             ? "leaves few queries with many keys to sm80/forward, which splits the keys"
             : "";
}

}  // namespace

std::string forward_supports(const Problem& problem, const Grouping& grouping) {
  if (const std::string reason = refusal(problem); !reason.empty()) {
    return reason;
  }
  if (is_by_blocks(problem, grouping)) {
    return kTakesOneGrouping;
  }
  const std::string reason = device_refusal();
  return reason.empty() ? preference(problem) : reason;
}

std::string forward_blocks_supports(const Problem& problem, const Grouping& grouping) {
  if (const std::string reason = refusal(problem); !reason.empty()) {
    return reason;
  }
  if (!is_by_blocks(problem, grouping)) {
    return "takes groupings of blocks of less than seq_q rows";
  }
  constexpr int kRows = 128;  // of a thread block
  if (grouping.block % kRows != 0) {
    return "takes blocks of a multiple of 128 rows";
  }
  const int members = device_problem(problem, grouping, nullptr).members;
  if (members != 1 && members != 2 && members != 4) {
    return "takes lsh with groups of 2 and 4 columns";
  }
  const std::string reason = device_refusal();
  return reason.empty() ? preference(problem) : reason;
}

std::size_t forward_workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  Workspace workspace;
  const Operands counted(problem, grouping, workspace);
  return workspace.used();
}

void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution) {
  Call call(problem, grouping, tensors, execution);
  const std::int64_t exact_rows = common::count_exact_rows(problem, grouping);
  if (exact_rows > 0) {
    call.attend_exactly(exact_rows);
  }
  if (exact_rows < problem.seq_q) {
    call.attend_grouped(exact_rows);
  }
}

}  // namespace distr::cuda::sm90
