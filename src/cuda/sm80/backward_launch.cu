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

struct Space {
  Extent queries;
  std::int64_t stats_rows;
  float2* stats;
  Operand k, v, d_o;
  std::optional<Operand> q;  // exact
  void* spread = nullptr;    // else: Q~
  float* delta = nullptr;    // wanted by the gradient of a mask
  float* sums = nullptr;     // see BackwardParameters; wanted by the atomic additions, and the last piece

  Space(const Problem& p, const Grouping& grouping, Workspace& workspace)
      : queries{p.batch, p.heads_q, p.seq_q, p.head_dim},
        stats_rows((p.seq_q + kStatsRows - 1) / kStatsRows * kStatsRows),
        stats(workspace.take<float2>(p.batch * p.heads_q * stats_rows)),
        k(Operand::by_rows(p.k, {p.batch, p.heads_kv, p.seq_k, p.head_dim}, workspace)),
        v(Operand::by_rows(p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace)),
        d_o(Operand::by_rows(p.o, {p.batch, p.heads_q, p.seq_q, p.head_dim_v}, workspace)) {
    if (is_exact(grouping)) {
      q = Operand::by_rows(p.q, queries, workspace);
    } else {
      spread = workspace.take<std::uint16_t>(packed_count(queries));
    }
    if (p.mask.kind == MaskKind::additive) {
      delta = workspace.take<float>(p.batch * p.heads_q * p.seq_q);
    }
  }

  void take_sums(const Problem& p, Workspace& workspace) {
    sums = workspace.take<float>(p.batch * p.heads_q * stats_rows * find(p)->dim);
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

// What both backwards do: `space` is in the workspace, and `launch` starts the variant's kernels.
void run_with(Space space, decltype(BackwardVariant::launch) launch_kernels, const Problem& problem,
              const Grouping& grouping, const BackwardTensors& tensors, void* stream) {
  BackwardParameters p{};
  p.problem = device_problem(problem, grouping, tensors.mask);
  prepare_rows(problem.dtype,
               {p.problem, tensors.q, tensors.o, tensors.d_o, static_cast<const float*>(tensors.lse),
                static_cast<const float*>(tensors.d_lse), tensors.order, space.stats_rows, space.stats, space.delta,
                space.spread},
               stream);
  if (space.q) {
    space.q->read(tensors.q, "Q", stream);
    p.q = space.q->data;
    p.problem.q = space.q->strides;
  } else {
    p.q = space.spread;
    p.problem.q = packed_strides(space.queries);
  }
  space.k.read(tensors.k, "K", stream);
  space.v.read(tensors.v, "V", stream);
  space.d_o.read(tensors.d_o, "dO", stream);
  p.k = space.k.data;
  p.v = space.v.data;
  p.d_o = space.d_o.data;
  p.problem.k = space.k.strides;
  p.problem.v = space.v.strides;
  p.problem.o = space.d_o.strides;
  p.stats = space.stats;
  p.stats_rows = space.stats_rows;
  p.sums = space.sums;
  p.order = tensors.order;
  p.scale = static_cast<float>(problem.softmax_scale());
  p.d_q = tensors.d_q;
  p.d_k = tensors.d_k;
  p.d_v = tensors.d_v;
  p.d_q_strides = problem.q;
  p.d_k_strides = problem.k;
  p.d_v_strides = problem.v;
  launch_kernels(p, stream);
  if (tensors.d_mask != nullptr) {
    run_mask_gradient(problem, grouping, tensors, space.delta, stream);
  }
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
  Workspace workspace(execution.workspace);
  const Space space(problem, grouping, workspace);
  run_with(space, find(problem)->launch, problem, grouping, tensors, execution.stream);
}

std::size_t backward_atomics_workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  Workspace workspace;
  Space counted(problem, grouping, workspace);
  counted.take_sums(problem, workspace);
  return workspace.used();
}

void run_backward_atomics(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                          const Execution& execution) {
  Workspace workspace(execution.workspace);
  Space space(problem, grouping, workspace);
  space.take_sums(problem, workspace);
  run_with(space, find(problem)->launch_atomics, problem, grouping, tensors, execution.stream);
}

}  // namespace distr::cuda::sm80
