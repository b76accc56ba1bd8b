// SPDX-License-Identifier: Apache-2.0
// What was measured and holds for kernels of every architecture: when strategy `auto` should approximate, which tiles
// share the L2, how rows are shared out that are prepared, and keys and blocks that are ordered. What is one
// architecture's is in its own heuristics.h. Plain C++: a build without CUDA asks it too.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "common/advice.h"
#include "common/element.h"
#include "common/near.h"
#include "kernel.h"

namespace distr::cuda {

// Which problems the kernel sm90/forward serves on the current device.
struct HopperServes {
  bool exact = false;   // this one, attended exactly
  bool energy = false;  // and with strategy `energy`
};

// Where `energy` is worth its error to those who ask for it, on an NVIDIA H200 with the tensor-core kernels and tiles
// of 128 queries: smaller heads lose too much when half of their columns go; on shorter sequences it was, in the middle
// of the settings, less than 1.15 times as quick as exact attention (bench/results/h200/experiments/tune_tiles.json;
// docs/auto.md).
inline constexpr std::array kAdviceCrossovers{common::Crossover{64, 8192}};
// Beside exact attention by Hopper's own kernel, in bf16 and with one grouping for the whole sequence
// (bench/results/h200/torch.json). Groupings by blocks gain nothing in the backward.
inline constexpr std::array kAdviceCrossoversOfHopper{common::Crossover{64, 16384}};

// What the tensor-core kernels were not measured with, or do not gain enough with (near keys:
// bench/results/h200/near.json, h200/near_portable.json); empty: nothing.
[[nodiscard]] inline std::string unmeasured(const Problem& problem, const Grouping& grouping) {
  constexpr std::int64_t kTileRows = 128;
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "as on a GPU no approximation has been measured in other types than f16 and bf16";
  }
  if (std::max(problem.head_dim, problem.head_dim_v) > 256) {
    return "as on a GPU no approximation has been measured for a head_dim or head_dim_v above 256";
  }
  if (problem.mask.kind != MaskKind::none) {
    return "as on a GPU no approximation has been measured with a mask tensor";
  }
  if (grouping.block % kTileRows != 0 && grouping.block < problem.seq_q) {
    return "as on a GPU an approximation pays for blocks that " + std::to_string(kTileRows) + " divides, and " +
           std::to_string(grouping.block) + " is none";
  }
  if (common::has_near_keys(grouping)) {
    return "as on a GPU an approximation with near keys is less than 1.15 times as quick as exact attention";
  }
  return {};
}

[[nodiscard]] inline Advice advise(const Problem& problem, const Grouping& grouping, HopperServes hopper) {
  if (hopper.exact && !(hopper.energy && problem.dtype == DType::bf16)) {
    return {false,
            "as this GPU has kernels for it that an approximation is quicker than, forward and backward, only in bf16 "
            "with the whole sequence as one block"};
  }
  if (std::string reason = unmeasured(problem, grouping); !reason.empty()) {
    return {false, std::move(reason)};
  }
  return common::advice_by(hopper.exact ? kAdviceCrossoversOfHopper : kAdviceCrossovers, problem);
}

// How many heads a launch of so many tiles a head takes together, where so many thread blocks run at the same time:
// none but where it is causal. There, enough for an even end, or all whose K and V stay in the L2 (docs/kernel-log.md,
// sm90/forward, step 48).
[[nodiscard]] inline int interleaved_heads(const Problem& problem, std::int64_t tiles_of_head, std::int64_t blocks) {
  if (problem.causal == Causal::none) {
    return 0;
  }
  constexpr std::int64_t kTogetherBytes = std::int64_t{24} << 20;
  constexpr std::int64_t kTilesABlock = 3;
  const std::int64_t head_bytes = problem.seq_k * (problem.head_dim + problem.head_dim_v) * 2;
  const std::int64_t in_cache = kTogetherBytes / std::max(head_bytes, std::int64_t{1});
  const std::int64_t even = common::ceil_div(kTilesABlock * blocks, std::max(tiles_of_head, std::int64_t{1}));
  return static_cast<int>(std::min(std::max(in_cache, even), problem.batch * problem.heads_q));
}

// The order of `energy`, on an H200 (docs/kernel-log/grouping.md, cuda/energy).
namespace energy {

// Into how many runs the keys of a KV head are cut, each for a thread block: up to kMaxRuns (step 14), of all heads
// about as many as a GPU runs at once.
inline constexpr int kMaxRuns = 64;
inline constexpr int kGridRuns = 256;
inline constexpr int kMinRunKeys = 128;

// How many blocks of Q of a head a thread block orders, one after another (step 5).
[[nodiscard]] inline std::int64_t blocks_in_turn(std::int64_t blocks_of_all_heads) {
  constexpr std::int64_t kGrid = 1024;  // thread blocks
  return std::max<std::int64_t>(1, blocks_of_all_heads / kGrid);
}

// Loads of a thread that are in flight at once: many where runs are and columns, of all thread blocks, so few that
// those run at once with 104 registers a thread (step 18).
inline constexpr int kRunLoads = 4;
inline constexpr int kManyRunLoads = 16;
[[nodiscard]] inline bool has_many_loads(std::int64_t runs, std::int64_t thread_blocks, std::int64_t columns) {
  constexpr std::int64_t kFewColumns = 32768;
  return runs > std::int64_t{4} * kRunLoads && thread_blocks * columns <= kFewColumns && columns <= 256;
}

}  // namespace energy

// How many tiles of 64 rows, which divide a block of Q (0: all divide it), a thread block estimates (estimate.h):
// several, where that leaves enough thread blocks for every SM.
[[nodiscard]] inline std::int64_t estimated_tiles(std::int64_t tiles, std::int64_t tiles_of_block,
                                                  std::int64_t num_sms) {
  constexpr std::int64_t kMaxTiles = 4;
  constexpr std::int64_t kCtasPerSm = 8;
  std::int64_t result = std::clamp(tiles / (kCtasPerSm * num_sms), std::int64_t{1}, kMaxTiles);
  while (result > 1 && tiles_of_block % result != 0) {
    --result;
  }
  return result;
}

}  // namespace distr::cuda
