// SPDX-License-Identifier: Apache-2.0
// A far score is q_hat k_hat^T and a constant of its row, c (cuda/prepare/dropped_scores.h):
//   P = 2^(scale (S + c) - LSE)
// so the statistics of far scores are those of the row with c added. And dQ of a dropped column takes its keys' mean
// times the row's sum of dS over far keys. dS sums to dLSE over all keys, and over near ones to
//   sum P (dP - D) = p (dO O_n - D)
// where O_n is attention to near keys alone and p their share of the row. The forward's launch of near keys makes both
// anew, so the backward kernel needs no sum over keys. Rows that see no far key get 0.
//
// The keys of a part of a longer call do not sum to dLSE, those of all of a row's parts do. So each part gives what its
// near keys leave of its share, 0 or, of the part with key 0, which every row sees, dLSE: the parts add up.
//
// Eight lanes take a row. Bound by memory, 6 bytes a column.
#include "cuda/sm90/backward_means.h"

#include <algorithm>
#include <iterator>

#include "cuda/dependent_launch.cuh"
#include "cuda/near.cuh"
#include "cuda/prepare/dropped_scores.h"
#include "cuda/prepare/query_rows.h"
#include "cuda/prepare/row_dot.cuh"
#include "cuda/prepare/stats_columns.cuh"
#include "cuda/sm90/heuristics.h"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / kRowLanes;

struct FarRows {
  DeviceProblem problem;
  std::int64_t first_row, stats_rows;
  const StatsColumns* stats;
  const float* dropped;
  NearResult near;
  int near_columns;  // of its O
  const void* d_o;
  bool aligned;        // rows of dO begin at a multiple of 16 bytes
  const float* d_lse;  // or null
  bool is_part;
  StatsColumns* far_stats;
  float* far_sums;
};

template <class T>
__global__ void __launch_bounds__(kThreads) far_rows_kernel(const __grid_constant__ FarRows p) {
  launch_dependent_grids();
  wait_on_dependent_grids();
  const DeviceProblem& problem = p.problem;
  const auto blocks = static_cast<unsigned>(p.stats_rows / kRows);  // of a head
  const std::int64_t head = blockIdx.x / blocks;                    // of all batches
  const std::int64_t row = std::int64_t{blockIdx.x % blocks} * kRows + threadIdx.x / kRowLanes;
  const std::int64_t index = head * p.stats_rows + row;
  const std::int64_t tile = index / kStatsTile;
  const uint4 of_shift = p.stats[tile].shift[index % kStatsTile];
  const uint4 of_d = p.stats[tile].minus_d[index % kStatsTile];
  const float shift = sum_columns({of_shift.x, of_shift.y});
  const float d = -sum_columns({of_d.x, of_d.y});
  const bool is_valid = row < problem.seq_q;
  const bool has_constant = is_valid && row >= p.first_row && shift != kHidingShift;
  const std::int64_t at = head * problem.seq_q + row;
  float share = 0;  // of near keys
  if (has_constant) {
    const float2 near = p.near.stats[at];
    share = near.y == 0.0F ? 0.0F : near.y * exp2f((near.x + shift) * problem.scale_log2);
  }
  const auto b = static_cast<unsigned>(head) / static_cast<unsigned>(problem.heads_q);
  const auto h = static_cast<unsigned>(head) % static_cast<unsigned>(problem.heads_q);
  const T* const d_o = static_cast<const T*>(p.d_o) + b * problem.o.batch + h * problem.o.head + row * problem.o.row;
  const float product = row_dot(d_o, p.near.o + at * p.near_columns, share == 0.0F ? 0 : problem.head_dim_v, p.aligned);
  if (threadIdx.x % kRowLanes == 0) {
    float far = 0;
    if (has_constant && (p.is_part || near_tiles(problem, row, visible_keys(problem, row)).far_count() > 0)) {
      const float of_near = share == 0.0F ? 0.0F : share * (product - d);
      far = (p.d_lse == nullptr ? 0.0F : p.d_lse[at]) - of_near;
    }
    p.far_stats[tile].shift[index % kStatsTile] = has_constant ? met_columns(shift + p.dropped[at]) : of_shift;
    p.far_stats[tile].minus_d[index % kStatsTile] = of_d;
    if (is_valid) {
      p.far_sums[at] = far;
    }
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
  near_ = launches_of(listed_variants(), p, sizes, {ScaleIn::softmax, p.head_dim, KeyLoad::listed_tma}, first_row_,
                      p.seq_q, kRowsOfTwo)
              .list;
  dropped_ = {workspace, "scores of dropped columns", rows};
  near_o_ = {workspace, "O of near keys", rows * near_.front().variant->values};
  near_stats_ = {workspace, "row max and sum of near keys", rows};
  far_stats_ = {workspace, "far rows' statistics", p.batch * p.heads_q * stats_rows_of(sizes) / kStatsTile};
  far_sums_ = {workspace, "sums of dS over far keys", rows};
}

std::vector<LaunchShape> BackwardMeans::launches() const {
  std::vector<LaunchShape> result;
  std::transform(near_.begin(), near_.end(), std::back_inserter(result), shape_of);
  return result;
}

void BackwardMeans::run(const BackwardTensors& tensors, const Operand& q, const Operand& k, const Operand& v,
                        const StatsColumns* stats, void* workspace, void* stream) const {
  const NearResult near{near_o_.in(workspace), near_stats_.in(workspace), problem_.scale_log2};
  ForwardParameters forward{};
  forward.problem = problem_;
  forward.listed.set = KeySet::near;
  forward.listed.near = near;
  run_launches(near_, dtype_, forward, q, &k, v, stream);
  dropped_scores(dtype_, problem_, first_row_, q, tensors.order, tensors.key_means, dropped_.in(workspace), stream);
  const std::int64_t stats_rows = stats_rows_of(problem_);
  static_assert(kStatsRows % kRows == 0);
  const std::int64_t blocks = problem_.batch * problem_.heads_q * stats_rows / kRows;
  const FarRows rows{problem_,
                     first_row_,
                     stats_rows,
                     stats,
                     dropped_.in(workspace),
                     near,
                     near_.front().variant->values,
                     tensors.d_o,
                     has_aligned_rows(problem_.o) && reinterpret_cast<std::uintptr_t>(tensors.d_o) % 16 == 0,
                     takes_d_lse_ ? static_cast<const float*>(tensors.d_lse) : nullptr,
                     is_part_,
                     far_stats_.in(workspace),
                     far_sums_.in(workspace)};
  launch_dependent(dtype_ == DType::f16 ? far_rows_kernel<__half> : far_rows_kernel<__nv_bfloat16>,
                   dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, rows);
}

}  // namespace distr::cuda::sm90
