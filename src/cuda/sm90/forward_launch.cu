// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward_launch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "cuda/launch.h"
#include "cuda/other_variants.h"
#include "cuda/prepare.h"
#include "cuda/sm90/estimate.h"
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

// The quickest of the narrowest shapes that the problem fits.
[[nodiscard]] const Variant& find(const Problem& problem, Scores scores, std::int64_t groups) {
  const Variant* found = nullptr;
  for (const Variant& variant : OtherVariants<Variant>::or_else(variants())) {
    if (variant.dtype != problem.dtype || variant.scores != scores || variant.columns < groups ||
        variant.values < problem.head_dim_v) {
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

// The tensors as the kernel reads them, and room for their estimates.
struct Operands {
  Operand q, k, v;
  void* q_hat = nullptr;
  void* k_hat = nullptr;
  std::int64_t groups;

  Operands(const Problem& p, const Grouping& grouping, Workspace& workspace)
      : q(copied(p.q, {p.batch, p.heads_q, p.seq_q, p.head_dim}, workspace)),
        k(copied(p.k, {p.batch, p.heads_kv, p.seq_k, p.head_dim}, workspace)),
        v(copied(p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace)),
        groups(is_exact_here(p, grouping) ? p.head_dim : num_groups(p, grouping)) {
    if (!is_exact_here(p, grouping)) {
      q_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_q, groups}));
      k_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_k, groups}));
    }
  }
};

}  // namespace

std::string forward_supports(const Problem& problem, const Grouping& grouping) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16";
  }
  if (std::max(problem.head_dim, problem.head_dim_v) > 128) {
    return "takes head_dim and head_dim_v up to 128";
  }
  if (problem.mask.kind != MaskKind::none) {
    return "takes no mask tensor";
  }
  if (!(problem.softmax_scale() > 0)) {
    return "takes scales above 0";
  }
  if (problem.seq_k == 0) {
    return "takes at least one key";
  }
  if (std::max(problem.seq_q, problem.seq_k) > std::numeric_limits<std::int32_t>::max() / 512) {
    return "takes sequences up to 4194303";
  }
  if (const std::string reason = grid_refusal(problem); !reason.empty()) {
    return reason;
  }
  if (!is_exact_here(problem, grouping) && grouping.block < problem.seq_q) {
    return "takes one grouping for the whole sequence: blocks of at least seq_q rows";
  }
  if (!unusable_reason().empty()) {
    return {};  // which is then what is said
  }
  const DeviceProperties& device = device_properties();
  if (device.major != 9) {
    return "needs compute capability 9.0";
  }
  constexpr std::int64_t kManyKeys = 2048;
  const std::int64_t tiles = problem.batch * problem.heads_q * common::ceil_div(problem.seq_q, std::int64_t{128});
  if (4 * tiles < device.processors && problem.seq_k > kManyKeys) {
    return "leaves few queries with many keys to sm80/forward, which splits the keys";
  }
  return {};
}

std::size_t forward_workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  Workspace workspace;
  const Operands counted(problem, grouping, workspace);
  return workspace.used();
}

void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution) {
  void* const stream = execution.stream;
  Workspace workspace(execution.workspace);
  Operands operands(problem, grouping, workspace);
  operands.q.read(tensors.q, "Q", stream);
  operands.k.read(tensors.k, "K", stream);
  operands.v.read(tensors.v, "V", stream);

  ForwardParameters p{};
  p.problem = device_problem(problem, grouping, nullptr);
  // In bf16 q_hat takes the scale in (Config's Scores), unless LSE is asked for: that rounding would be in it, and a
  // backward that reads it has none.
  const bool scaled = operands.q_hat != nullptr && problem.dtype == DType::bf16 && tensors.lse == nullptr;
  if (operands.q_hat != nullptr) {
    const float scale = scaled ? std::exchange(p.problem.scale_log2, 1.0F) : 1.0F;
    const auto estimated = [&](Operand& x, Estimate kind, float factor, void* to) {
      estimate(x.data, x.strides, x.extent, tensors.order,
               {problem.dtype, kind, problem.heads_q, p.problem.groups, p.problem.members, factor}, to, stream);
      x.data = to;
      x.extent.heads = problem.heads_q;
      x.extent.columns = operands.groups;
      x.strides = packed_strides(x.extent);
    };
    estimated(operands.q, p.problem.mean ? Estimate::mean : Estimate::first, scale, operands.q_hat);
    estimated(operands.k, Estimate::sum, 1.0F, operands.k_hat);
    p.keys_of_query_head = true;
  }
  const Variant& variant = find(problem, scaled ? Scores::logarithms : Scores::raw, operands.groups);
  const auto map = [&](const Operand& x, int rows, int columns) {
    return tensor_map(x, problem.dtype, {rows, std::min(columns, 64)});
  };
  constexpr int kConsumerRows = 64;
  p.q = map(operands.q, kConsumerRows, variant.columns);
  p.k = map(operands.k, variant.keys, variant.columns);
  p.v = map(operands.v, variant.keys, variant.values);
  p.o = tensors.o;
  p.lse = static_cast<float*>(tensors.lse);
  p.section = heads_in_cache(problem);
  p.row_end = problem.seq_q;
  variant.launch(p, stream);
}

}  // namespace distr::cuda::sm90
