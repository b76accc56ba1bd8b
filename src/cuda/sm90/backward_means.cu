// SPDX-License-Identifier: Apache-2.0
// A far score is q_hat k_hat^T and a constant of its row, c (cuda/prepare/dropped_scores.h):
//   P = 2^(scale (S + c) - LSE)
// so the statistics of far scores are those of the row with c added. And dQ of a dropped column takes its keys' mean
// times the row's sum of dS over far keys. dS sums to dLSE over all keys; over near ones the kernel sums it
// (backward_ds_sums.cuh). Rows that see no far key get 0.
//
// The keys of a part of a longer call do not sum to dLSE, those of all of a row's parts do. So each part gives what its
// near keys leave of its share, 0 or, of the part with key 0, which every row sees, dLSE: the parts add up.
#include "cuda/sm90/backward_means.h"

#include "cuda/dependent_launch.cuh"
#include "cuda/near.cuh"
#include "cuda/prepare/dropped_scores.h"
#include "cuda/prepare/query_rows.h"
#include "cuda/prepare/stats_columns.cuh"

namespace distr::cuda::sm90 {
namespace {

constexpr int kThreads = kStatsRows;  // each has a row

struct Arguments {
  DeviceProblem problem;
  std::int64_t first_row, stats_rows;
  const StatsColumns* stats;
  const float* dropped;
  const float* d_lse;  // or null
  bool is_part;
  StatsColumns* far_stats;
  FarRow* far_rows;
};

__global__ void __launch_bounds__(kThreads) far_rows_kernel(const __grid_constant__ Arguments p) {
  launch_dependent_grids();
  wait_on_dependent_grids();
  const DeviceProblem& problem = p.problem;
  const auto blocks = static_cast<unsigned>(p.stats_rows / kThreads);  // of a head
  const std::int64_t head = blockIdx.x / blocks;                       // of all batches
  const std::int64_t row = std::int64_t{blockIdx.x % blocks} * kThreads + threadIdx.x;
  const std::int64_t index = head * p.stats_rows + row;
  const std::int64_t tile = index / kStatsTile;
  const uint4 of_shift = p.stats[tile].shift[index % kStatsTile];
  const float shift = sum_columns({of_shift.x, of_shift.y});
  const bool is_valid = row < problem.seq_q;
  const bool has_constant = is_valid && row >= p.first_row && shift != kHidingShift;
  const std::int64_t at = head * problem.seq_q + row;
  p.far_stats[tile].shift[index % kStatsTile] = has_constant ? met_columns(shift + p.dropped[at]) : of_shift;
  p.far_stats[tile].minus_d[index % kStatsTile] = p.stats[tile].minus_d[index % kStatsTile];
  if (is_valid) {
    const bool has_far =
        has_constant && (p.is_part || near_tiles(problem, row, visible_keys(problem, row)).far_count() > 0);
    p.far_rows[at] = {p.d_lse == nullptr ? 0.0F : p.d_lse[at], has_far};
  }
}

}  // namespace

BackwardMeans::BackwardMeans(const Problem& p, const Grouping& grouping, const DeviceProblem& sizes,
                             WorkspaceLayout& workspace)
    : dtype_(p.dtype),
      problem_(sizes),
      first_row_(common::count_exact_rows(p, grouping)),
      is_part_(grouping.part.has_value()),
      takes_d_lse_(!is_part_ || grouping.part->first_key == 0) {
  const std::int64_t rows = p.batch * p.heads_q * p.seq_q;
  dropped_ = {workspace, "scores of dropped columns", rows};
  far_stats_ = {workspace, "far rows' statistics", p.batch * p.heads_q * stats_rows_of(sizes) / kStatsTile};
  far_rows_ = {workspace, "far rows", rows};
}

DroppedScores BackwardMeans::dropped(const BackwardTensors& tensors, void* workspace) const {
  return {tensors.key_means, dropped_.in(workspace), static_cast<unsigned>(problem_.heads_kv),
          static_cast<unsigned>(problem_.near.means)};
}

void BackwardMeans::make_dropped(const BackwardTensors& tensors, const Operand& q, void* workspace,
                                 void* stream) const {
  dropped_scores(dtype_, problem_, first_row_, q, tensors.order, tensors.key_means, dropped_.in(workspace), stream);
}

void BackwardMeans::run(const BackwardTensors& tensors, const StatsColumns* stats, void* workspace,
                        void* stream) const {
  const std::int64_t stats_rows = stats_rows_of(problem_);
  const std::int64_t blocks = problem_.batch * problem_.heads_q * stats_rows / kThreads;
  const Arguments arguments{problem_,
                            first_row_,
                            stats_rows,
                            stats,
                            dropped_.in(workspace),
                            takes_d_lse_ ? static_cast<const float*>(tensors.d_lse) : nullptr,
                            is_part_,
                            far_stats_.in(workspace),
                            far_rows_.in(workspace)};
  launch_dependent(far_rows_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, arguments);
}

}  // namespace distr::cuda::sm90
