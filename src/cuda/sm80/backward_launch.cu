// SPDX-License-Identifier: Apache-2.0
// With Q~ = q_hat spread over the d columns, q_hat k_hat^T = Q~ K^T: the grouped backward is the exact one of Q~, whose
// dQ~ is summed over each group (method, 3). So one pair of kernels serves every grouping.
#include "cuda/sm80/backward_launch.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "cuda/launch.h"
#include "cuda/plain/backward.cuh"
#include "cuda/plain/mask_gradient.h"
#include "cuda/plain/plain.h"
#include "cuda/prepare.h"
#include "cuda/sm80/backward_prepare.h"
#include "cuda/sm80/backward_variants.h"

namespace distr::cuda::sm80 {
namespace {

// Within a tile the kernels reckon in 32 bits.
constexpr std::int64_t kMaxRowStride = std::int64_t{1} << 24;

[[nodiscard]] const BackwardVariant* find(const Problem& problem) {
  const auto variants = problem.dtype == DType::f16 ? backward_variants_f16() : backward_variants_bf16();
  const bool masks = problem.mask.kind != MaskKind::none;
  for (const BackwardVariant& variant : variants) {
    if (variant.dim >= std::max(problem.head_dim, problem.head_dim_v) && (variant.masks || !masks)) {
      return &variant;
    }
  }
  return nullptr;
}

// Where the kernels read a tensor: where it is, or a copy with rows of 16 bytes.
struct Source {
  Strides strides;
  Extent extent;
  void* copy = nullptr;

  Source(const Strides& given, const Extent& sizes, Workspace& workspace) : strides(given), extent(sizes) {
    if (!has_aligned_rows(given) || given.row < 0 || given.row >= kMaxRowStride || extent.columns % 8 != 0) {
      copy = workspace.take<std::uint16_t>(packed_count(extent));
    }
  }
  // `read`: the strides of what is returned.
  const void* prepare(const void* tensor, const char* name, Strides& read, void* stream) const {
    if (copy == nullptr) {
      if (reinterpret_cast<std::uintptr_t>(tensor) % 16 != 0) {
        throw Error(Status::invalid_argument,
                    std::string(name) + " is not aligned; allowed: addresses that 16 divides");
      }
      read = strides;
      return tensor;
    }
    pack(tensor, strides, extent, copy, stream);
    read = packed_strides(extent);
    return copy;
  }
};

struct Space {
  Extent queries;
  std::int64_t stats_rows;
  float2* stats;
  Source k, v, d_o;
  std::optional<Source> q;  // exact
  void* spread = nullptr;   // else: Q~
  float* delta = nullptr;   // wanted by the gradient of a mask

  Space(const Problem& p, const Grouping& grouping, Workspace& workspace)
      : queries{p.batch, p.heads_q, p.seq_q, p.head_dim},
        stats_rows((p.seq_q + kStatsRows - 1) / kStatsRows * kStatsRows),
        stats(workspace.take<float2>(p.batch * p.heads_q * stats_rows)),
        k(p.k, {p.batch, p.heads_kv, p.seq_k, p.head_dim}, workspace),
        v(p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace),
        d_o(p.o, {p.batch, p.heads_q, p.seq_q, p.head_dim_v}, workspace) {
    if (is_exact(grouping)) {
      q.emplace(p.q, queries, workspace);
    } else {
      spread = workspace.take<std::uint16_t>(packed_count(queries));
    }
    if (p.mask.kind == MaskKind::additive) {
      delta = workspace.take<float>(p.batch * p.heads_q * p.seq_q);
    }
  }
};

// By the plain kernel, in fp32.
void run_mask_gradient(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors, float* delta,
                       void* stream) {
  plain::BackwardArguments arguments{};
  arguments.problem = plain::tiled_problem(problem, grouping, tensors.mask);
  arguments.tiles = plain::tiles_of_block(arguments.problem);
  arguments.tiles_of_head = arguments.problem.blocks * arguments.tiles;
  arguments.scale = static_cast<float>(problem.softmax_scale());
  arguments.q = tensors.q;
  arguments.k = tensors.k;
  arguments.v = tensors.v;
  arguments.order = tensors.order;
  arguments.lse = static_cast<const float*>(tensors.lse);
  arguments.d_o = tensors.d_o;
  arguments.delta = delta;
  arguments.d_mask = static_cast<float*>(tensors.d_mask);
  for (int axis = 0; axis < 4; ++axis) {
    const int from = axis - (4 - problem.mask.rank);
    arguments.mask_shape[axis] = from < 0 ? 1 : problem.mask.shape[static_cast<std::size_t>(from)];
  }
  plain::launch_mask_gradient(problem.dtype, arguments, stream);
}

}  // namespace

std::string backward_supports(const Problem& problem, const Grouping& grouping) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16";
  }
  if (!(problem.softmax_scale() > 0)) {
    return "takes scales above 0";
  }
  if (find(problem) == nullptr) {
    return "takes head_dim and head_dim_v up to 256";
  }
  if (std::max(problem.seq_q, problem.seq_k) > std::numeric_limits<std::int32_t>::max() / 512) {
    return "takes sequences up to 4194303";
  }
  // As double: int64 could overflow.
  const double rows = static_cast<double>(problem.batch) * static_cast<double>(problem.heads_q) *
                      static_cast<double>((problem.seq_q + kStatsRows - 1) / kStatsRows * kStatsRows);
  if (rows / kPreparedRows > std::numeric_limits<std::int32_t>::max()) {
    return "takes up to 68719476704 rows of Q, each head's up to a multiple of 128";
  }
  return plain::supports(problem, grouping);  // its gradient of a mask; the other grids are no larger
}

std::size_t backward_workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  Workspace workspace;
  const Space counted(problem, grouping, workspace);
  return workspace.used();
}

void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& execution) {
  void* const stream = execution.stream;
  Workspace workspace(execution.workspace);
  const Space space(problem, grouping, workspace);

  BackwardParameters p{};
  p.problem = device_problem(problem, grouping, tensors.mask);
  prepare_rows(problem.dtype,
               {p.problem, tensors.q, tensors.o, tensors.d_o, static_cast<const float*>(tensors.lse),
                static_cast<const float*>(tensors.d_lse), tensors.order, space.stats_rows, space.stats, space.delta,
                space.spread},
               stream);
  if (space.q) {
    p.q = space.q->prepare(tensors.q, "Q", p.problem.q, stream);
  } else {
    p.q = space.spread;
    p.problem.q = packed_strides(space.queries);
  }
  p.k = space.k.prepare(tensors.k, "K", p.problem.k, stream);
  p.v = space.v.prepare(tensors.v, "V", p.problem.v, stream);
  p.d_o = space.d_o.prepare(tensors.d_o, "dO", p.problem.o, stream);
  p.stats = space.stats;
  p.stats_rows = space.stats_rows;
  p.order = tensors.order;
  p.scale = static_cast<float>(problem.softmax_scale());
  p.d_q = tensors.d_q;
  p.d_k = tensors.d_k;
  p.d_v = tensors.d_v;
  p.d_q_strides = problem.q;
  p.d_k_strides = problem.k;
  p.d_v_strides = problem.v;
  find(problem)->launch(p, stream);
  if (tensors.d_mask != nullptr) {
    run_mask_gradient(problem, grouping, tensors, space.delta, stream);
  }
}

}  // namespace distr::cuda::sm80
