// SPDX-License-Identifier: Apache-2.0
// One grouping for the whole sequence has q_hat and k_hat made beforehand. Where blocks of queries have groupings of
// their own, the kernel is the exact one of Q~, q_hat spread over the d columns: q_hat k_hat^T = Q~ K^T (method, 3).
#include "cuda/sm90/backward_launch.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/prepare.h"
#include "cuda/sm80/backward_prepare.h"
#include "cuda/sm90/backward_round.h"
#include "cuda/sm90/backward_variants.h"
#include "cuda/sm90/estimate.h"
#include "cuda/sm90/refusal.h"
#include "cuda/sm90/tensor_map.h"
#include "kernel.h"

namespace distr::cuda::sm90 {
namespace {

// The narrowest shape that the problem fits.
[[nodiscard]] const BackwardVariant& find(const Problem& problem, std::int64_t groups) {
  const auto variants = backward_variants();
  return *std::find_if(variants.begin(), variants.end(), [&](const BackwardVariant& variant) {
    return variant.dtype == problem.dtype && variant.columns >= groups && variant.values >= problem.head_dim_v;
  });
}

[[nodiscard]] std::int64_t whole(std::int64_t rows, std::int64_t tile) { return common::ceil_div(rows, tile) * tile; }

// How many heads are worked on at the same time: those whose Q, dO and sums of dQ stay in the L2 together, but enough
// for several blocks an SM. Then few blocks of one head wait for each other, and where attention is causal the long
// ones of the last heads do not begin late.
[[nodiscard]] int section_of(const Problem& problem, const BackwardVariant& variant) {
  constexpr std::int64_t kCacheBytes = std::int64_t{36} << 20;
  constexpr std::int64_t kBlocksAProcessor = 4;
  const std::int64_t bytes_a_head = problem.seq_q * (2 * (variant.columns + variant.values) + 4 * variant.columns);
  const std::int64_t blocks_a_head = common::ceil_div(problem.seq_k, std::int64_t{kKeyTileRows});
  const std::int64_t enough = common::ceil_div(kBlocksAProcessor * device_properties().processors, blocks_a_head);
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t sections = std::max(heads / std::max(kCacheBytes / bytes_a_head, enough), std::int64_t{1});
  return static_cast<int>(common::ceil_div(heads, sections));  // none much smaller than the others
}

// Of the sums of dQ.
enum class Order : std::uint8_t { of_keys, any };

// The tensors as the kernel reads them, and room for what is made of them.
struct Space {
  Order order;
  bool by_blocks;
  std::int64_t groups;  // columns of the kernel's Q and K
  const BackwardVariant& variant;
  std::int64_t heads, stats_rows, query_rows, key_rows;  // rows of whole tiles
  float2* stats;
  float* sums;
  unsigned* turns = nullptr;  // and the ticket behind them; null: any order
  void* spread;  // Q~ where blocks of queries have groupings of their own, which is the kernel's Q then; else null
  Operand q, k, v, d_o;
  void* q_hat = nullptr;  // of one grouping for the whole sequence
  void* k_hat = nullptr;
  float* d_k_parts = nullptr;
  float* d_v_parts = nullptr;

  Space(const Problem& p, const Grouping& grouping, Order of_sums, Workspace& workspace)
      : order(of_sums),
        by_blocks(is_by_blocks(p, grouping)),
        groups(by_blocks || common::count_exact_rows(p, grouping) == p.seq_q ? p.head_dim : num_groups(p, grouping)),
        variant(find(p, groups)),
        heads(p.batch * p.heads_q),
        stats_rows(whole(p.seq_q, sm80::kStatsRows)),
        query_rows(whole(p.seq_q, kQueryTileRows)),
        key_rows(whole(p.seq_k, kKeyTileRows)),
        stats(workspace.take<float2>(heads * stats_rows)),
        sums(workspace.take<float>(num_sums())),
        spread(by_blocks ? workspace.take<std::uint16_t>(packed_count(queries(p))) : nullptr),
        q(by_blocks ? Operand(packed_strides(queries(p)), queries(p), true, workspace)
                    : copied(p.q, queries(p), workspace)),
        k(copied(p.k, {p.batch, p.heads_kv, p.seq_k, p.head_dim}, workspace)),
        v(copied(p.v, {p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, workspace)),
        d_o(copied(p.o, {p.batch, p.heads_q, p.seq_q, p.head_dim_v}, workspace)) {
    if (order == Order::of_keys) {
      turns = workspace.take<unsigned>(num_turns() + 1);
    }
    const bool one_grouping = groups < p.head_dim;
    if (one_grouping) {
      q_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_q, groups}));
      k_hat = workspace.take<std::uint16_t>(packed_count({p.batch, p.heads_q, p.seq_k, groups}));
    }
    const bool shared = p.heads_q != p.heads_kv;
    if (one_grouping || shared) {
      d_k_parts = workspace.take<float>(heads * key_rows * variant.columns);
    }
    if (shared) {
      d_v_parts = workspace.take<float>(heads * key_rows * variant.values);
    }
  }
  [[nodiscard]] static Extent queries(const Problem& p) { return {p.batch, p.heads_q, p.seq_q, p.head_dim}; }
  [[nodiscard]] std::int64_t num_sums() const { return heads * query_rows * variant.columns; }
  [[nodiscard]] std::int64_t num_turns() const { return heads * (query_rows / kQueryTileRows); }
  // What the kernel counts on: nobody's turn was yet and no ticket is taken, or nothing was added yet.
  void clear(void* stream) const {
    const auto zero = [&](void* from, std::int64_t count) {  // of four bytes
      check(cudaMemsetAsync(from, 0, static_cast<std::size_t>(count) * 4, static_cast<cudaStream_t>(stream)),
            "cudaMemsetAsync");
    };
    order == Order::of_keys ? zero(turns, num_turns() + 1) : zero(sums, num_sums());
  }
};

// dQ, dK and dV from their sums, as far as the kernel has not written them.
void round_all(const Problem& problem, const DeviceProblem& device, const Space& space, const BackwardTensors& tensors,
               void* stream) {
  Rounding r{};
  r.dtype = problem.dtype;
  r.batch = problem.batch;
  r.heads = problem.heads_q;
  const bool one_grouping = space.q_hat != nullptr;
  const bool exact = !one_grouping && !space.by_blocks;
  r.order = exact ? nullptr : tensors.order;
  r.blocks = device.blocks;
  r.block = device.block;
  r.first_block_is_exact = device.first_block_is_exact;
  r.spread = space.by_blocks;
  r.groups = device.groups;
  r.members = device.members;
  r.scale = static_cast<float>(problem.softmax_scale());

  r.sums = space.sums;
  r.padded_rows = space.query_rows;
  r.padded_columns = space.variant.columns;
  r.first_row = std::int64_t{first_query_tile(device, 0)} * kQueryTileRows;
  r.share = exact ? Share::all : device.mean ? Share::mean : Share::first;
  r.heads_together = 1;
  r.rows = problem.seq_q;
  r.columns = static_cast<int>(problem.head_dim);
  r.to = tensors.d_q;
  r.strides = problem.q;
  round_sums(r, stream);

  r.first_row = 0;
  r.heads_together = problem.heads_q / problem.heads_kv;
  r.rows = problem.seq_k;
  r.padded_rows = space.key_rows;
  r.share = Share::all;
  r.order = one_grouping ? tensors.order : nullptr;
  r.blocks = 1;
  r.block = std::max(problem.seq_k, problem.seq_q);
  r.spread = false;
  if (space.d_k_parts != nullptr) {
    r.sums = space.d_k_parts;
    r.to = tensors.d_k;
    r.strides = problem.k;
    round_sums(r, stream);
  }
  if (space.d_v_parts != nullptr) {
    r.sums = space.d_v_parts;
    r.padded_columns = space.variant.values;
    r.order = nullptr;
    r.scale = 1;
    r.columns = static_cast<int>(problem.head_dim_v);
    r.to = tensors.d_v;
    r.strides = problem.v;
    round_sums(r, stream);
  }
}

std::size_t count_bytes(const Problem& problem, const Grouping& grouping, Order order) {
  Workspace workspace;
  const Space counted(problem, grouping, order, workspace);
  return workspace.used();
}

void run(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors, Order order,
         const Execution& execution) {
  void* const stream = execution.stream;
  Workspace workspace(execution.workspace);
  Space space(problem, grouping, order, workspace);
  space.q.read(space.by_blocks ? space.spread : tensors.q, "Q", stream);
  space.k.read(tensors.k, "K", stream);
  space.v.read(tensors.v, "V", stream);
  space.d_o.read(tensors.d_o, "dO", stream);

  space.clear(stream);  // first, so that nothing stands between the kernels: each starts before the last one ends
  BackwardParameters p{};
  p.problem = device_problem(problem, grouping, nullptr);
  sm80::prepare_rows(problem.dtype,
                     {p.problem, tensors.q, tensors.o, tensors.d_o, static_cast<const float*>(tensors.lse),
                      static_cast<const float*>(tensors.d_lse), tensors.order, space.stats_rows, space.stats, nullptr,
                      space.spread, sm80::Stats::tiles},
                     stream);
  if (space.q_hat != nullptr) {
    const Estimate kind = p.problem.mean ? Estimate::mean : Estimate::first;
    const Groups groups{problem.dtype, tensors.order, problem.heads_q, p.problem.members, p.problem.groups};
    const std::array estimations{Estimation{space.q, kind, problem.seq_q, 0, false, 1, space.q_hat},
                                 Estimation{space.k, Estimate::sum, problem.seq_k, 0, false, 1, space.k_hat}};
    estimate(groups, estimations, stream);
    space.q = estimations[0].result(groups);
    space.k = estimations[1].result(groups);
    p.keys_of_query_head = true;
  }
  constexpr int kMostColumns = 64;  // of a box
  const int columns = space.variant.columns;
  const int values = std::min(space.variant.values, kMostColumns);
  p.q = tensor_map(space.q, problem.dtype, {kQueryTileRows, std::min(columns, kMostColumns)});
  p.k = tensor_map(space.k, problem.dtype, {kKeyTileRows, columns / 2});
  p.v = tensor_map(space.v, problem.dtype, {kKeyTileRows, values});
  p.d_o = tensor_map(space.d_o, problem.dtype, {kQueryTileRows, values});
  p.stats = space.stats;
  p.stats_rows = space.stats_rows;
  p.sums = space.sums;
  p.turns = space.turns;
  p.ticket = space.turns == nullptr ? nullptr : space.turns + space.num_turns();
  p.scale = static_cast<float>(problem.softmax_scale());
  p.d_k = tensors.d_k;
  p.d_v = tensors.d_v;
  p.d_k_strides = problem.k;
  p.d_v_strides = problem.v;
  p.d_k_parts = space.d_k_parts;
  p.d_v_parts = space.d_v_parts;
  p.section = section_of(problem, space.variant);
  space.variant.launch(p, stream);
  round_all(problem, p.problem, space, tensors, stream);
}

}  // namespace

std::string backward_supports(const Problem& problem, const Grouping& grouping) {
  if (const std::string reason = refusal(problem); !reason.empty()) {
    return reason;
  }
  if (problem.seq_q == 0) {
    return "takes at least one query";
  }
  if (is_by_blocks(problem, grouping) && grouping.block % kRoundedRows != 0) {
    return "takes blocks that 64 divides, or of at least seq_q rows";
  }
  return device_refusal();
}

std::size_t backward_workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  return count_bytes(problem, grouping, Order::of_keys);
}

void run_backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                  const Execution& execution) {
  run(problem, grouping, tensors, Order::of_keys, execution);
}

std::size_t backward_atomics_workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  return count_bytes(problem, grouping, Order::any);
}

void run_backward_atomics(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                          const Execution& execution) {
  run(problem, grouping, tensors, Order::any, execution);
}

}  // namespace distr::cuda::sm90
