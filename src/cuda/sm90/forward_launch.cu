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

// What a launch needs of a compiled kernel, but for its rows.
struct Wanted {
  ScaleIn scale_in;
  std::int64_t columns;
  KeyLoad load = KeyLoad::tma;
};

// The narrowest shape of so many rows, and blocks an SM, that the problem fits; null: there is none.
[[nodiscard]] const Variant* find(const Problem& problem, const Wanted& wanted, std::int64_t rows, int blocks = 1) {
  const Variant* found = nullptr;
  for (const Variant& variant : OtherVariants<Variant>::or_else(variants())) {
    const bool fits = variant.dtype == problem.dtype && variant.scale_in == wanted.scale_in &&
                      variant.load == wanted.load && variant.columns >= wanted.columns &&
                      variant.values >= problem.head_dim_v && variant.rows == rows && variant.blocks == blocks;
    const auto width = [](const Variant& of) { return of.columns + of.values; };
    if (fits && (found == nullptr || width(variant) < width(*found))) {
      found = &variant;
    }
  }
  return found;
}

// The product that makes grouped scores.
enum class Product : std::uint8_t {
  made,    // q_hat k_hat^T, both made beforehand: one grouping for the whole sequence
  picked,  // q_hat k_hat^T, where k_hat^T is rows of K^T: energy by blocks
  summed,  // q_hat k_hat^T, where k_hat is sums of columns of K: few groups, by blocks
  spread   // Q~ K^T, where Q~ is q_hat spread over the d columns: other groupings by blocks
};

constexpr std::int64_t kFusingRows = 128;  // of a thread block, which makes k_hat for all of them

// By blocks, sums of K's columns for each block of queries cost as much as products of d/2 columns save, and pay for
// d/4 (docs/kernel-log.md, sm90/forward, steps 55 and 59). Columns that energy drops are saved, but beside K^T, which
// is made first, and at d = 64 without the kernels of three consumers and of two blocks an SM: that pays for few
// columns and many keys (step 56).
[[nodiscard]] Product product_of(const Problem& problem, const Grouping& grouping) {
  if (!is_by_blocks(problem, grouping)) {
    return Product::made;
  }
  if (grouping.block % kFusingRows != 0) {
    return Product::spread;
  }
  constexpr std::int64_t kFewKeys = 4096;
  const std::int64_t groups = num_groups(problem, grouping);
  const bool is_wide = problem.head_dim > 64;
  if (grouping.strategy == Strategy::energy) {
    return is_wide || (groups <= 16 && problem.seq_k > kFewKeys) ? Product::picked : Product::spread;
  }
  return is_wide && groups <= 32 ? Product::summed : Product::spread;
}

// The tensors as the kernel reads them, and room for what is made of them.
struct Operands {
  Operand q, k, v;
  std::int64_t columns = 0;  // of q_hat, or of Q~
  void* q_hat = nullptr;
  void* k_hat = nullptr;            // Product::made
  void* keys_transposed = nullptr;  // Product::picked

  Operands(const Problem& p, const Grouping& grouping, Workspace& workspace)
      : q(copied(p.q, {p.batch, p.heads_q, p.seq_q, p.head_dim}, workspace)),
        k(copied(p.k, {p.batch, p.heads_kv, p.seq_k, p.head_dim}, workspace)),
        v(copied(p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace)) {
    if (common::count_exact_rows(p, grouping) == p.seq_q) {
      return;
    }
    const Product product = product_of(p, grouping);
    columns = product == Product::spread ? p.head_dim : num_groups(p, grouping);
    q_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_q, columns}));
    if (product == Product::made) {
      k_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_k, columns}));
    } else if (product == Product::picked) {
      const std::int64_t rows = p.batch * p.heads_kv * (p.head_dim + 1);
      keys_transposed = workspace.take<std::uint16_t>(rows * column_stride(p.seq_k));
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
    launch({ScaleIn::softmax, problem_.head_dim}, 0, rows, operands_.q, &operands_.k);
  }

  // The rows from `row` on, by their groupings.
  void attend_grouped(std::int64_t row) {
    // In bf16 q_hat takes the scale in (ScaleIn), unless LSE is asked for: that rounding would be in it, and a
    // backward that reads it has none.
    const bool scaled = problem_.dtype == DType::bf16 && tensors_.lse == nullptr;
    const float scale = scaled ? std::exchange(p_.problem.scale_log2, 1.0F) : 1.0F;
    const Product product = product_of(problem_, grouping_);
    const Operand& k = operands_.k;
    const Groups groups{problem_.dtype, tensors_.order, problem_.heads_q, p_.problem.members, p_.problem.groups};
    const Estimation q_hat{operands_.q,
                           p_.problem.mean ? Estimate::mean : Estimate::first,
                           grouping_.block,
                           row,
                           product == Product::spread,
                           scale,
                           operands_.q_hat};
    const Operand q = q_hat.result(groups);
    const KeyLoad load = product == Product::picked   ? KeyLoad::gather
                         : product == Product::summed ? KeyLoad::fuse
                                                      : KeyLoad::tma;
    const Wanted wanted{scaled ? ScaleIn::queries : ScaleIn::softmax, operands_.columns, load};
    if (product == Product::made) {
      p_.keys_of_query_head = true;
      const Estimation k_hat{k, Estimate::sum, problem_.seq_k, 0, false, 1, operands_.k_hat};
      estimate(groups, std::array{q_hat, k_hat}, stream_);
      const Operand made = k_hat.result(groups);
      launch(wanted, row, problem_.seq_q, q, &made);
      return;
    }
    estimate(groups, std::span(&q_hat, 1), stream_);
    if (product == Product::picked) {
      transpose(k.data, k.strides, k.extent, operands_.keys_transposed, stream_);
      p_.keys_transposed = operands_.keys_transposed;
      p_.column_stride = column_stride(problem_.seq_k);
      launch(wanted, row, problem_.seq_q, q, nullptr);
    } else {
      launch(wanted, row, problem_.seq_q, q, &k);
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
      p_.k = map(*k, variant.keys, variant.load == KeyLoad::fuse ? variant.values : variant.columns);
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
  constexpr int kEstimatedRows = 64;  // at a time
  if (grouping.block % kEstimatedRows != 0) {
    return "takes blocks of a multiple of 64 rows";
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
