// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/forward_launch.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "cuda/launch.h"
#include "cuda/other_variants.h"
#include "cuda/prepare.h"
#include "cuda/sm80/backward_prepare.h"
#include "cuda/sm80/choice.h"
#include "cuda/sm80/variants.h"

namespace distr::cuda::sm80 {
namespace {

// What a call needs of the compiled kernels. Exact kernels serve exact attention, and block 0 of `previous`.
struct Wanted {
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

[[nodiscard]] bool is_fused_beforehand(const Problem& problem, const Grouping& grouping) noexcept {
  return !is_exact(grouping) && grouping.strategy == Strategy::lsh && grouping.block >= problem.seq_q;
}

[[nodiscard]] Wanted wanted(const Problem& problem, const Grouping& grouping, bool exact) noexcept {
  const DeviceProblem sizes = device_problem(problem, grouping, nullptr);
  return {.dim = std::max(problem.head_dim, problem.head_dim_v),
          .groups = exact ? problem.head_dim : sizes.groups,
          .exact = exact,
          .masks = problem.mask.kind != MaskKind::none,
          .members = is_fused_beforehand(problem, grouping) ? 1 : sizes.members,
          .block = exact || grouping.block >= problem.seq_q ? 0 : grouping.block};
}

thread_local std::int64_t forced_rows = 0;  // of tiles, by ForcedRows; 0: as choice.h has it

// Pairs of a query and a key that see each other, of all heads, for each SM.
[[nodiscard]] double scores_per_processor(const Problem& p, std::int64_t row_begin, std::int64_t row_end) {
  const auto keys = [&](std::int64_t row) {
    return p.causal == Causal::none ? p.seq_k
                                    : std::clamp(row + 1 + common::causal_offset(p), std::int64_t{0}, p.seq_k);
  };
  const double mean = static_cast<double>(keys(row_begin) + keys(row_end - 1)) / 2;
  return mean * static_cast<double>(p.batch * p.heads_q * (row_end - row_begin)) / device_properties().processors;
}

[[nodiscard]] std::span<const Variant> variants_of(DType dtype) {
  return OtherVariants<Variant>::or_else(dtype == DType::f16 ? variants_f16() : variants_bf16());
}

// The least padding, and then the rows that choice.h prefers for so many scores.
[[nodiscard]] const Variant* find(const Problem& problem, const Wanted& wanted, double scores = 0) {
  const auto rank = [&](const Variant& v) {
    const std::int64_t rows =
        forced_rows > 0 ? forced_rows : chosen_rows(v.dim, v.groups, v.members, problem.causal != Causal::none, scores);
    return std::tuple(v.dim, v.groups, v.rows != rows);
  };
  const Variant* best = nullptr;
  for (const Variant& variant : variants_of(problem.dtype)) {
    if (wanted.takes(variant) && (best == nullptr || rank(variant) < rank(*best))) {
      best = &variant;
    }
  }
  return best;
}

// Whether the groups are other than those that kernels are compiled for, or than those of so small a head dim: then
// q_hat is spread over the d columns, and q_hat k_hat^T = Q~ K^T is the exact kernels' (method, 3).
[[nodiscard]] bool is_spread(const Problem& problem, const Grouping& grouping) {
  if (common::count_exact_rows(problem, grouping) == problem.seq_q) {
    return false;
  }
  const Variant* const grouped = find(problem, wanted(problem, grouping, false));
  const Variant* const exact = find(problem, wanted(problem, grouping, true));
  return grouped == nullptr || (exact != nullptr && exact->dim < grouped->dim);
}

// One launch of a kernel: which rows it takes, and which of them are split over the keys.
struct Launch {
  const Variant* variant;
  std::int64_t row_begin, row_end;
  int together;  // heads: Tiles
  Split split;
  bool early;

  static Launch of(const Problem& p, const Grouping& grouping, bool exact, std::int64_t row_begin,
                   std::int64_t row_end) {
    const Variant& variant = *find(p, wanted(p, grouping, exact), scores_per_processor(p, row_begin, row_end));
    const DeviceProperties& device = device_properties();
    const std::int64_t fitting = device.shared_bytes_processor / (variant.shared_bytes + kReservedBytes);
    Launched launched{};
    const std::int64_t tiles_of_head = Tiles::of_head(row_begin, row_end, variant.rows);
    launched.tiles = p.batch * p.heads_q * tiles_of_head;
    launched.processors = device.processors;
    launched.resident = std::clamp(fitting, std::int64_t{1}, std::int64_t{variant.blocks_a_processor});
    launched.causal = p.causal != Causal::none;
    const std::int64_t keys =
        launched.causal ? std::clamp(row_end + common::causal_offset(p), std::int64_t{0}, p.seq_k) : p.seq_k;
    launched.key_tiles = common::ceil_div(keys, variant.keys);
    const int together = heads_together(p, tiles_of_head, launched.processors * launched.resident);
    if (launched.causal) {  // they are looked at where all tiles run at once, and then all heads are together
      const std::int64_t long_rows = row_end + common::causal_offset(p) - keys * 3 / 5;
      launched.long_tiles = p.batch * p.heads_q *
                            common::ceil_div(std::clamp(long_rows, std::int64_t{0}, row_end - row_begin), variant.rows);
    }
    // Blocks that all run at once should be spread evenly over the SMs: not those that are free first.
    const bool early = launched.causal || launched.tiles > launched.processors * launched.resident;
    return {&variant, row_begin, row_end, together, plan_split(launched), early};
  }
  [[nodiscard]] std::int64_t split_rows() const noexcept { return split.blocks() * variant->rows; }

 private:
  static constexpr int kReservedBytes = 1024;  // of shared memory, by the system, for every block
};

// The launches of a call, and the tensors as its kernels take them.
struct Prepared {
  std::optional<Launch> exact, grouped;
  Operand q, v;
  std::optional<Operand> k;  // of exact rows
  void* spread = nullptr;    // Q~, which q then is
  void* columns = nullptr;   // K^T
  void* fused = nullptr;     // k_hat^T
  float* piece_o = nullptr;
  float2* piece_row = nullptr;

  Prepared(const Problem& p, const Grouping& grouping, Workspace& workspace)
      : Prepared(p, grouping, is_spread(p, grouping), workspace) {}

  static Extent key_extent(const Problem& p) { return {p.batch, p.heads_kv, p.seq_k, p.head_dim}; }

 private:
  Prepared(const Problem& p, const Grouping& grouping, bool spreads, Workspace& workspace)
      : q(queries(p, spreads, workspace)),
        v(Operand::by_rows(p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace)) {
    std::int64_t exact_rows = common::count_exact_rows(p, grouping);
    if (spreads) {
      spread = workspace.take<std::uint16_t>(packed_count(q.extent));
      exact_rows = p.seq_q;
    }
    if (exact_rows > 0) {
      exact = Launch::of(p, grouping, true, 0, exact_rows);
      k = Operand::by_rows(p.k, key_extent(p), workspace);
    }
    if (exact_rows < p.seq_q) {
      grouped = Launch::of(p, grouping, false, exact_rows, p.seq_q);
      const std::int64_t stride = column_stride(p.seq_k);
      columns = workspace.take<std::uint16_t>(p.batch * p.heads_kv * (p.head_dim + 1) * stride);
      if (is_fused_beforehand(p, grouping)) {
        fused = workspace.take<std::uint16_t>(p.batch * p.heads_q * (num_groups(p, grouping) + 1) * stride);
      }
    }
    std::int64_t rows = 0;  // of pieces; the launches follow each other
    std::int64_t elements = 0;
    for (const auto& launch : {exact, grouped}) {
      if (launch) {
        rows = std::max(rows, launch->split_rows());
        elements = std::max(elements, launch->split_rows() * launch->variant->dim);
      }
    }
    piece_o = workspace.take<float>(elements);
    piece_row = workspace.take<float2>(rows);
  }

  static Operand queries(const Problem& p, bool spread, Workspace& workspace) {
    const Extent extent{p.batch, p.heads_q, p.seq_q, p.head_dim};
    return spread ? Operand(packed_strides(extent), extent, true, workspace) : Operand::by_rows(p.q, extent, workspace);
  }
};

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
  if (const std::string reason = grid_refusal(problem); !reason.empty()) {
    return reason;
  }
  const bool has_exact_rows = common::count_exact_rows(problem, grouping) > 0 || is_spread(problem, grouping);
  return has_exact_rows && find(problem, wanted(problem, grouping, true)) == nullptr
             ? "has no exact kernel for these sizes"
             : "";
}

std::size_t forward_workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  Workspace workspace;
  const Prepared counted(problem, grouping, workspace);
  return workspace.used();
}

void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution) {
  void* const stream = execution.stream;
  Workspace workspace(execution.workspace);
  Prepared space(problem, grouping, workspace);

  ForwardParameters p{};
  p.problem = device_problem(problem, grouping, tensors.mask);
  if (space.spread != nullptr) {
    spread_rows(problem.dtype, p.problem, tensors.q, tensors.order, space.spread, stream);
    space.q.data = space.spread;
  } else {
    space.q.read(tensors.q, "Q", stream);
  }
  space.v.read(tensors.v, "V", stream);
  p.q = space.q.data;
  p.v = space.v.data;
  p.problem.q = space.q.strides;
  p.problem.v = space.v.strides;
  p.o = tensors.o;
  p.lse = static_cast<float*>(tensors.lse);
  p.order = tensors.order;

  const auto run = [&](const Launch& launch) {
    p.tiles = Tiles(p.problem, launch.together, launch.row_begin, launch.row_end, launch.variant->rows);
    p.row_end = launch.row_end;
    p.split = launch.split;
    p.split.o = space.piece_o;
    p.split.row = space.piece_row;
    launch.variant->launch(p, launch.early, stream);
  };
  if (space.exact) {
    space.k->read(tensors.k, "K", stream);
    p.k = space.k->data;
    p.problem.k = space.k->strides;
    run(*space.exact);
  }
  if (space.grouped) {
    p.column_stride = column_stride(problem.seq_k);
    transpose(tensors.k, problem.k, Prepared::key_extent(problem), space.columns, stream);
    p.k = space.columns;
    if (space.fused != nullptr) {
      fuse(space.columns, tensors.order,
           {problem.dtype, problem.batch, problem.heads_q, problem.heads_kv, problem.head_dim, p.column_stride,
            p.problem.groups, p.problem.members},
           space.fused, stream);
      p.k = space.fused;
      p.fused = true;
    }
    run(*space.grouped);
  }
}

std::vector<tuning::Tile> forward_tiles(const Problem& problem, const Grouping& grouping) {
  const Wanted need = wanted(problem, grouping, is_exact(grouping) || is_spread(problem, grouping));
  const Variant& taken = *find(problem, need, scores_per_processor(problem, 0, problem.seq_q));
  std::vector<tuning::Tile> tiles{{taken.rows, taken.keys, taken.dim, taken.groups}};
  for (const Variant& variant : variants_of(problem.dtype)) {
    if (need.takes(variant) && variant.dim == taken.dim && variant.groups == taken.groups &&
        variant.rows != taken.rows) {
      tiles.push_back({variant.rows, variant.keys, variant.dim, variant.groups});
    }
  }
  return tiles;
}

ForcedRows::ForcedRows(std::int64_t rows) { forced_rows = rows; }
ForcedRows::~ForcedRows() { forced_rows = 0; }

}  // namespace distr::cuda::sm80
