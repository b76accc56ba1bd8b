// SPDX-License-Identifier: Apache-2.0
// What a backward needs of the means that far scores keep of dropped columns (method, 8): they are constants of a row
// in its scores, and in dQ of its dropped columns.
#pragma once

#include <cstdint>

#include "cuda/prepare/estimate.h"
#include "cuda/prepare/stats_columns.cuh"
#include "cuda/sm90/backward_convert.h"
#include "cuda/workspace.h"
#include "kernel.h"

namespace distr::cuda::sm90 {

class BackwardMeans {
 public:
  BackwardMeans(const Problem& problem, const Grouping& grouping, const DeviceProblem& sizes,
                WorkspaceLayout& workspace);

  // The scores of dropped columns come first: by Estimates, or where there are none by themselves.
  [[nodiscard]] DroppedScores dropped(const BackwardTensors& tensors, void* workspace) const;
  void make_dropped(const BackwardTensors& tensors, const Operand& q, void* workspace, void* stream) const;
  // stats: of all rows.
  void run(const BackwardTensors& tensors, const StatsColumns* stats, void* workspace, void* stream) const;
  // As stats, for far scores without their constant.
  [[nodiscard]] const StatsColumns* far_stats(void* workspace) const { return far_stats_.in(workspace); }
  // [B, Hq, Nq], sums without the scale.
  [[nodiscard]] const FarRow* far_rows(void* workspace) const { return far_rows_.in(workspace); }

 private:
  DType dtype_;
  DeviceProblem problem_;
  std::int64_t first_row_;  // that has dropped columns
  bool is_part_;            // of a longer call
  bool takes_d_lse_;
  Part<float> dropped_;
  Part<StatsColumns> far_stats_;
  Part<FarRow> far_rows_;
};

}  // namespace distr::cuda::sm90
