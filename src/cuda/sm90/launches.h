// SPDX-License-Identifier: Apache-2.0
// Which compiled shapes of the forward kernel take which queries, and in which launches.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cuda/launch.h"
#include "cuda/prepare/operand.h"
#include "cuda/sm90/variants.h"

namespace distr::cuda::sm90 {

// What some launches need of a compiled kernel, but for their rows.
struct KernelRequest {
  ScaleIn scale_in;
  std::int64_t columns;
  KeyLoad load = KeyLoad::tma;
};

// One launch of a kernel.
struct Launch {
  const Variant* variant;
  const Variant* with_lse;  // where LSE is asked for: of as many rows, with the scale in the softmax; null: none
  TileScheduler scheduler;
  std::int64_t row_end;
  unsigned next_tile;
  bool is_second;
};

struct Launches {
  std::vector<Launch> list;
  std::vector<TileShape> tiles;  // that their rows can have; first those of the kernel that takes the first rows
};

// Of the queries begin .. end - 1 of every head, one or two launches. tile_rows: 0, or those of a thread block.
[[nodiscard]] Launches launches_of(std::span<const Variant> variants, const Problem& problem,
                                   const DeviceProblem& sizes, const KernelRequest& request, std::int64_t begin,
                                   std::int64_t end, std::int64_t tile_rows);

// Whether there is a shape for near keys and far ones in one launch (near_far.cuh).
[[nodiscard]] bool has_near_far_shape(std::span<const Variant> variants, const Problem& problem,
                                      const KernelRequest& request);

// What scores of far keys are made of, where a launch takes near keys as well. k: null where keys are gathered from
// K^T, or are those of near scores.
struct FarOperands {
  Operand q;
  const Operand* k;
};

// Runs them one after the other. p: but for what each launch has. q: what scores are made of, of near keys where there
// are `far` ones; k: null where keys are gathered from K^T.
void run_launches(const std::vector<Launch>& launches, DType dtype, ForwardParameters& p, const Operand& q,
                  const Operand* k, const Operand& v, const FarOperands* far, void* stream);

[[nodiscard]] TileShape tile_of(const Variant& variant) noexcept;
[[nodiscard]] LaunchShape shape_of(const Launch& launch) noexcept;

}  // namespace distr::cuda::sm90
