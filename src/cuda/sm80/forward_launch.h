// SPDX-License-Identifier: Apache-2.0
// The host side of the sm_80 forward kernel: what it takes, its workspace, and what runs before it.
#pragma once

#include <cstddef>
#include <string>

#include "distr/attention.h"
#include "tiles.h"

namespace distr::cuda::sm80 {

std::string forward_supports(const Problem& problem, const Grouping& grouping);
std::size_t forward_workspace_bytes(const Problem& problem, const Grouping& grouping, int threads);
void run_forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                 const Execution& execution);

// The tiles that there are for the problem, which forward_supports(): the one that it takes first.
std::vector<tuning::Tile> forward_tiles(const Problem& problem, const Grouping& grouping);

// While it lives, the calls of its thread take tiles of so many queries, which must be among forward_tiles().
class ForcedRows {
 public:
  explicit ForcedRows(std::int64_t rows);
  ForcedRows(const ForcedRows&) = delete;
  ForcedRows& operator=(const ForcedRows&) = delete;
  ~ForcedRows();
};

}  // namespace distr::cuda::sm80
