// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward_launch.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "cuda/launch.h"
#include "cuda/other_variants.h"
#include "cuda/prepare.h"
#include "cuda/sm90/estimate.h"
#include "cuda/sm90/refusal.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/variants.h"
#include "cuda/sm90/waves.h"

namespace distr::cuda::sm90 {
namespace {

// What a launch needs of a compiled kernel, but for its rows. `members`: Config's kMembers.
struct Wanted {
  Scores scores;
  std::int64_t columns;
  int members = 0;
};

// The narrowest shape of so many rows, and blocks an SM, that the problem fits; null: there is none.
[[nodiscard]] const Variant* find(const Problem& problem, const Wanted& wanted, std::int64_t rows, int blocks = 1) {
  const Variant* found = nullptr;
  for (const Variant& variant : OtherVariants<Variant>::or_else(variants())) {
    const bool fits = variant.dtype == problem.dtype && variant.scores == wanted.scores &&
                      variant.members == wanted.members && variant.columns >= wanted.columns &&
                      variant.values >= problem.head_dim_v && variant.rows == rows && variant.blocks == blocks;
    const auto width = [](const Variant& of) { return of.columns + of.values; };
    if (fits && (found == nullptr || width(variant) < width(*found))) {
      found = &variant;
    }
  }
  return found;
}

// The columns of q_hat and k_hat.
struct Columns {
  std::int64_t count;
  int of_group;

  // The kernel that fuses K adds pairs of its rows, so that a sum is rounded once. A group is several columns of k_hat
  // there, one for each pair, all with the group's q_hat.
  [[nodiscard]] static Columns of(const Problem& problem, const Grouping& grouping) {
    const int members = device_problem(problem, grouping, nullptr).members;
    return is_by_blocks(problem, grouping) && members > 1
               ? Columns{common::ceil_div(problem.head_dim, std::int64_t{2}), members / 2}
               : Columns{num_groups(problem, grouping), 1};
  }
};

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
    const std::int64_t columns = Columns::of(p, grouping).count;
    q_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_q, columns}));
    if (is_by_blocks(p, grouping)) {
      const std::int64_t rows = p.batch * p.heads_kv * (p.head_dim + 1);
      keys_transposed = workspace.take<std::uint16_t>(rows * column_stride(p.seq_k));
    } else {
      k_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_k, columns}));
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
    p_.order = tensors.order;
  }

  void attend_exactly(std::int64_t rows) {
    launch({Scores::raw, problem_.head_dim}, 0, rows, operands_.q, &operands_.k);
  }

  // The rows from `row` on, by their groupings.
  void attend_grouped(std::int64_t row) {
    // In bf16 q_hat takes the scale in (Config's Scores), unless LSE is asked for: that rounding would be in it, and a
    // backward that reads it has none.
    const bool scaled = problem_.dtype == DType::bf16 && tensors_.lse == nullptr;
    const float scale = scaled ? std::exchange(p_.problem.scale_log2, 1.0F) : 1.0F;
    const Columns columns = Columns::of(problem_, grouping_);
    const Groups groups{problem_.dtype, tensors_.order, problem_.heads_q, p_.problem.members};
    const Estimation q_hat{operands_.q,     p_.problem.mean ? Estimate::mean : Estimate::first,
                           grouping_.block, row,
                           columns.count,   columns.of_group,
                           scale,           operands_.q_hat};
    Wanted wanted{scaled ? Scores::logarithms : Scores::raw, columns.count};
    if (is_by_blocks(problem_, grouping_)) {
      const Operand& k = operands_.k;
      estimate(groups, std::span(&q_hat, 1), stream_);
      transpose(k.data, k.strides, k.extent, operands_.keys_transposed, stream_);
      p_.keys_transposed = operands_.keys_transposed;
      p_.column_stride = column_stride(problem_.seq_k);
      p_.problem.groups = static_cast<int>(columns.count);
      p_.problem.members = std::min(p_.problem.members, 2);
      wanted.members = p_.problem.members;
      launch(wanted, row, problem_.seq_q, q_hat.result(problem_.heads_q), nullptr);
    } else {
      p_.keys_of_query_head = true;
      const Estimation k_hat{operands_.k, Estimate::sum, problem_.seq_k, 0, columns.count, 1, 1, operands_.k_hat};
      estimate(groups, std::array{q_hat, k_hat}, stream_);
      const Operand k = k_hat.result(problem_.heads_q);
      launch(wanted, row, problem_.seq_q, q_hat.result(problem_.heads_q), &k);
    }
  }

 private:
  void launch(const Wanted& wanted, std::int64_t begin, std::int64_t end, const Operand& q, const Operand* k) {
    const Variant* const three = find(problem_, wanted, kRowsOfThree);
    const Variant* const two = find(problem_, wanted, kRowsOfTwo);
    const Variant* const sharing = find(problem_, wanted, kRowsOfTwo, 2);
    const Launched launched{problem_.batch * problem_.heads_q, end - begin, problem_.seq_k,
                            device_properties().processors, p_.problem.causal};
    if (sharing != nullptr && sharing->columns == two->columns && launched.is_quicker_sharing()) {
      launch(*sharing, begin, end, q, k);
      return;
    }
    const std::int64_t middle = begin + (three == nullptr ? 0 : launched.rows_for_three());
    if (begin < middle) {
      launch(*three, begin, middle, q, k);
    }
    if (middle < end) {
      p_.is_second = begin < middle;
      launch(*two, middle, end, q, k);
      p_.is_second = false;
    }
  }

  void launch(const Variant& variant, std::int64_t begin, std::int64_t end, const Operand& q, const Operand* k) {
    const auto map = [&](const Operand& x, int rows, int columns) {
      return tensor_map(x, problem_.dtype, {rows, std::min(columns, 64)});
    };
    constexpr int kConsumerRows = 64;
    p_.q = map(q, kConsumerRows, variant.columns);
    if (k != nullptr) {
      p_.k = map(*k, variant.keys, variant.columns);
    }
    p_.v = map(operands_.v, variant.keys, variant.values);
    const int blocks = device_properties().processors * variant.blocks;  // that run at the same time
    const int together = heads_together(problem_, Tiles::of_head(begin, end, variant.rows), blocks);
    p_.tiles = Tiles(p_.problem, together, begin, end, variant.rows);
    p_.row_end = end;
    p_.next_tile = static_cast<unsigned>(blocks);
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
    return "takes one grouping for the whole sequence: blocks of at least seq_q rows";
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
  if (members != 1 && members % 2 != 0) {
    return "takes lsh with groups of an even number of columns";
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
