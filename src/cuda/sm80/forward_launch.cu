// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/forward_launch.h"

#include <algorithm>
#include <limits>

#include "cuda/launch.h"
#include "cuda/prepare.h"
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

[[nodiscard]] const Variant* find(DType dtype, const Wanted& wanted) {
  const std::span<const Variant> variants = dtype == DType::f16 ? variants_f16() : variants_bf16();
  const Variant* best = nullptr;
  for (const Variant& variant : variants) {
    if (wanted.takes(variant) &&
        (best == nullptr || variant.dim < best->dim || (variant.dim == best->dim && variant.groups < best->groups))) {
      best = &variant;
    }
  }
  return best;
}

[[nodiscard]] bool has_exact_rows(const Grouping& grouping) noexcept {
  return is_exact(grouping) || grouping.order_from == OrderFrom::previous;
}
[[nodiscard]] bool has_grouped_rows(const Problem& problem, const Grouping& grouping) noexcept {
  return !is_exact(grouping) && (grouping.order_from == OrderFrom::own || problem.seq_q > grouping.block);
}

// Within a tile the kernel reckons in 32 bits.
constexpr std::int64_t kMaxRowStride = std::int64_t{1} << 24;

// The tensors as the kernel takes them.
struct Prepared {
  void* q = nullptr;  // null: as given
  void* k = nullptr;  // likewise; for exact rows
  void* v = nullptr;
  void* columns = nullptr;  // K^T
  void* fused = nullptr;    // k_hat^T

  Prepared(const Problem& p, const Grouping& grouping, Workspace& workspace) {
    const auto copy = [&](const Strides& strides, const Extent& extent) {
      return has_aligned_rows(strides) && strides.row < kMaxRowStride && extent.columns % 8 == 0
                 ? nullptr
                 : workspace.take<std::uint16_t>(packed_count(extent));
    };
    q = copy(p.q, query_extent(p));
    v = copy(p.v, value_extent(p));
    if (has_exact_rows(grouping)) {
      k = copy(p.k, key_extent(p));
    }
    if (has_grouped_rows(p, grouping)) {
      const std::int64_t stride = column_stride(p.seq_k);
      columns = workspace.take<std::uint16_t>(p.batch * p.heads_kv * (p.head_dim + 1) * stride);
      if (is_fused_beforehand(p, grouping)) {
        fused = workspace.take<std::uint16_t>(p.batch * p.heads_q * (num_groups(p, grouping) + 1) * stride);
      }
    }
  }

  static Extent query_extent(const Problem& p) { return {p.batch, p.heads_q, p.seq_q, p.head_dim}; }
  static Extent key_extent(const Problem& p) { return {p.batch, p.heads_kv, p.seq_k, p.head_dim}; }
  static Extent value_extent(const Problem& p) { return {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}; }
};

// The tensor itself, or its packed copy with `strides` changed to the copy's.
const void* prepared(const void* tensor, const char* name, Strides& strides, const Extent& extent, void* copy,
                     void* stream) {
  if (copy == nullptr) {
    if (reinterpret_cast<std::uintptr_t>(tensor) % 16 != 0) {
      throw Error(Status::invalid_argument, std::string(name) + " is not aligned; allowed: addresses that 16 divides");
    }
    return tensor;
  }
  pack(tensor, strides, extent, copy, stream);
  strides = packed_strides(extent);
  return copy;
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
  if (has_exact_rows(grouping) && find(problem.dtype, wanted(problem, grouping, true)) == nullptr) {
    return "has no exact kernel for these sizes";
  }
  if (has_grouped_rows(problem, grouping)) {
    if (grouping.block % 64 != 0 && grouping.block < problem.seq_q) {
      return "takes blocks that 64 divides, or of at least seq_q rows";
    }
    if (find(problem.dtype, wanted(problem, grouping, false)) == nullptr) {
      return "takes groups of 1, 2, 4 and 8 columns";
    }
  }
  return {};
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
  const Prepared space(problem, grouping, workspace);

  ForwardParameters p{};
  p.problem = device_problem(problem, grouping, tensors.mask);
  p.q = prepared(tensors.q, "Q", p.problem.q, Prepared::query_extent(problem), space.q, stream);
  p.v = prepared(tensors.v, "V", p.problem.v, Prepared::value_extent(problem), space.v, stream);
  p.o = tensors.o;
  p.lse = static_cast<float*>(tensors.lse);
  p.order = tensors.order;

  // Heads whose K and V stay in the L2 together.
  constexpr std::int64_t kSectionBytes = std::int64_t{24} << 20;
  const std::int64_t head_bytes = problem.seq_k * (problem.head_dim + problem.head_dim_v) * 2;
  p.section = static_cast<int>(std::clamp(kSectionBytes / std::max(head_bytes, std::int64_t{1}), std::int64_t{1},
                                          problem.batch * problem.heads_q));

  const std::int64_t exact_rows = is_exact(grouping)                           ? problem.seq_q
                                  : grouping.order_from == OrderFrom::previous ? std::min(grouping.block, problem.seq_q)
                                                                               : 0;
  if (exact_rows > 0) {
    p.k = prepared(tensors.k, "K", p.problem.k, Prepared::key_extent(problem), space.k, stream);
    p.row_begin = 0;
    p.row_end = exact_rows;
    find(problem.dtype, wanted(problem, grouping, true))->launch(p, stream);
  }
  if (exact_rows < problem.seq_q) {
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
    p.row_begin = exact_rows;
    p.row_end = problem.seq_q;
    find(problem.dtype, wanted(problem, grouping, false))->launch(p, stream);
  }
}

}  // namespace distr::cuda::sm80
