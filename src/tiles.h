// SPDX-License-Identifier: Apache-2.0
// For `distr tune` alone, and no part of the public API: the tiles that the CUDA forward is compiled for, and runs with
// one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distr/attention.h"

namespace distr::tuning {

struct Tile {
  std::int64_t rows;         // queries of a thread block
  std::int64_t keys;         // keys that it takes at once
  std::int64_t dim, groups;  // the kernel's d and r, to which those of the problem are padded

  bool operator==(const Tile&) const = default;
};

// Those that serve the problem, the one that forward() takes first. Empty, with `reason`: none.
[[nodiscard]] std::vector<Tile> forward_tiles(const Problem& problem, const Grouping& grouping, std::string& reason);

// As their namesakes in distr/attention.h, with one of forward_tiles(). The tensors are not checked.
[[nodiscard]] std::size_t workspace_bytes(const Problem& problem, const Grouping& grouping, const Tile& tile);
void forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
             const Execution& execution, const Tile& tile);

}  // namespace distr::tuning
