// SPDX-License-Identifier: Apache-2.0
// One grouping for the whole sequence has q_hat and k_hat made beforehand. Where blocks of queries have groupings of
// their own, the kernel is the exact one of Q~, q_hat spread over the d columns: q_hat k_hat^T = Q~ K^T (method, 3).
//
// With near keys (method, 8) the kernel of Q~ takes Q instead in tiles of queries that a block of keys is near to: one
// launch, with two sums of dQ. q_hat and k_hat are narrower than Q and K: near and far tiles are launches of their own,
// and dK has two sums as well. So has dV where heads share it; else the launch of far tiles adds the near ones to its
// own. Sums are in fp32, and far ones are added before near ones.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/prepare/estimate.h"
#include "cuda/prepare/operand.h"
#include "cuda/prepare/query_rows.h"
#include "cuda/sm90/backward_conversions.h"
#include "cuda/sm90/backward_means.h"
#include "cuda/sm90/backward_variants.h"
#include "cuda/workspace.h"
#include "kernel.h"

namespace distr::cuda::sm90 {

// The order in which dQ is summed; fixed: that of the keys.
enum class DqOrder : std::uint8_t { fixed, any };

// What a call does: it is decided here, and run() decides nothing more.
class BackwardPlan {
 public:
  BackwardPlan(const Problem& p, const Grouping& grouping, DqOrder order, WorkspaceLayout& workspace);

  void run(const BackwardTensors& tensors, void* workspace, void* stream) const;
  // The last one is that of far keys, or of all.
  [[nodiscard]] std::vector<LaunchShape> launches() const;

 private:
  void plan_near(const Problem& p, const Grouping& grouping, WorkspaceLayout& workspace);
  void plan_key_sums(const Problem& p, WorkspaceLayout& workspace);
  void plan_split(const Problem& p, WorkspaceLayout& workspace);
  // Zeros where the kernel counts on them: in turns and tickets, and in sums that no block is known to begin.
  void clear(void* workspace, void* stream) const;
  // Of near tiles in a launch of their own.
  [[nodiscard]] BackwardParameters parameters_of_near(BackwardParameters p, const Operand& k, void* workspace) const;
  // dQ, dK and dV from their sums, as far as the kernel has not written them.
  void convert_all(const BackwardTensors& tensors, void* workspace, void* stream) const;

  DType dtype_;
  Factors factors_;
  const BackwardVariant& variant_;
  bool has_near_;                                  // near keys have other factors than far ones
  const BackwardVariant* near_variant_ = nullptr;  // of the launch of near tiles; null: one launch has all
  Extent queries_;
  std::int64_t heads_, query_rows_, key_rows_;  // rows of whole tiles
  BackwardParameters parameters_{};             // but for the pointers
  QueryRows rows_{};                            // but for the pointers
  Part<StatsColumns> stats_;
  Part<float> dq_accum_;
  Part<std::uint16_t> spread_;  // Q~
  Input q_, k_, v_, d_o_;
  Part<unsigned> semaphores_;  // of dQ's tiles, and the ticket behind them; none: any order
  std::optional<Estimates> estimates_;
  Extent q_hat_extent_{}, k_hat_extent_{};
  Part<std::uint16_t> q_hat_, k_hat_;
  Part<float> d_k_parts_, d_v_parts_;
  Part<float> near_dq_accum_, near_d_k_parts_, near_d_v_parts_;
  SplitKeys near_split_{};                     // of the launch of near tiles
  Part<float> d_k_of_pieces_, d_v_of_pieces_;  // of the launch that is split
  std::optional<BackwardMeans> means_;
  BackwardConversions conversions_{};

  [[nodiscard]] bool reads_q() const { return factors_ != Factors::spread || has_near_; }
  [[nodiscard]] const BackwardVariant& near_variant() const { return near_variant_ ? *near_variant_ : variant_; }
  [[nodiscard]] std::int64_t dq_accum_count(const BackwardVariant& variant) const {
    return heads_ * query_rows_ * variant.columns;
  }
  // With rows' sums of dS.
  [[nodiscard]] std::int64_t near_dq_accum_count() const { return heads_ * query_rows_ * (near_variant().columns + 1); }
  [[nodiscard]] std::int64_t num_blocks() const {  // of keys
    const DeviceLengths& lengths = parameters_.lengths;
    return heads_ * (lengths.packed ? count_packed_tiles(lengths.total_k, rows_.problem.batch, kKeyTileRows)
                                    : key_rows_ / kKeyTileRows);
  }
  // Of a launch: those of its tiles, and behind them the ticket.
  [[nodiscard]] std::int64_t num_semaphores() const { return heads_ * (query_rows_ / kQueryTileRows) + 1; }
  [[nodiscard]] std::int64_t num_launches() const { return near_variant_ == nullptr ? 1 : 2; }
  [[nodiscard]] unsigned* ticket_behind(unsigned* semaphores) const {
    return semaphores == nullptr ? nullptr : semaphores + num_semaphores() - 1;
  }
};

}  // namespace distr::cuda::sm90
