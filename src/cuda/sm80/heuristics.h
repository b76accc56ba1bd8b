// SPDX-License-Identifier: Apache-2.0
// What was measured and is decided by it: tiles of how many queries a launch has, which of them are split over the
// keys.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "common/element.h"
#include "common/mask.h"
#include "cuda/heuristics.h"
#include "cuda/sm80/split_kv.h"

namespace distr::cuda::sm80 {

// Tiles of 64 or of 128 queries, where both are compiled: the choice for every (d, r), as `distr tune` measured it on
// an NVIDIA H200 (bench/results/h200/experiments/tune_tiles.json, to which tests/gpu/choice_test.cpp holds it).
// Tiles of 64 queries are quicker while there is little to do, as they spread over more SMs, and longer so where rows
// are causal, whose ends they meet closer; then tiles of 128, which read K and V half as often. What decides is the
// work: scores (pairs of a query and a key that see each other, of all heads) for each SM, whatever heads and lengths
// make them up. Choosing so loses 1.1 % of the time at most, mean over H = 1, 10 and N = 512 to 16384; tiles of 128
// alone lose up to 12 %, and up to 50 % for one size. Sums of four columns at d = 128 have tiles of 128 alone.
struct Crossover {
  int dim, groups, members;  // Config's
  double scores, causal;     // thousands an SM, up to which 64 are quicker
};

inline constexpr std::array kCrossovers = {
    Crossover{32, 32, 1, 25, 200},    Crossover{64, 64, 1, 400, 200},  Crossover{64, 32, 1, 25, 200},
    Crossover{64, 16, 1, 25, 200},    Crossover{64, 32, 2, 25, 25},    Crossover{64, 16, 4, 25, 200},
    Crossover{128, 128, 1, 100, 200}, Crossover{128, 64, 1, 100, 200}, Crossover{128, 32, 1, 25, 200},
    Crossover{128, 64, 2, 25, 50},
};

// The rows of a tile to prefer for a launch of `scores` an SM.
[[nodiscard]] constexpr int chosen_rows(int dim, int groups, int members, bool causal, double scores) noexcept {
  for (const Crossover& entry : kCrossovers) {
    if (entry.dim == dim && entry.groups == groups && entry.members == members) {
      return scores <= (causal ? entry.causal : entry.scores) * 1e3 ? 64 : 128;
    }
  }
  return 128;
}

// Pairs of a query and a key that see each other, of all heads, for each SM.
[[nodiscard]] inline double scores_per_sm(const Problem& p, std::int64_t row_begin, std::int64_t row_end,
                                          std::int64_t num_sms) {
  const auto keys = [&](std::int64_t row) {
    const common::KeySpan span = common::visible_keys(p, row);
    return std::max(span.end - span.first, std::int64_t{0});
  };
  const double mean = static_cast<double>(keys(row_begin) + keys(std::max(row_end, std::int64_t{1}) - 1)) / 2;
  return mean * static_cast<double>(p.batch * p.heads_q * (row_end - row_begin)) / static_cast<double>(num_sms);
}

// Whether thread blocks of so many rows pay with near keys, beside those of the fewest rows that are compiled: where
// there is enough to do, and where an SM has room for two of them, if it has room for two of the others. scores: for
// each SM; resident, resident_of_least: thread blocks of either that an SM runs at once (docs/kernel-log.md,
// sm80/near_forward, steps 35 and 37).
[[nodiscard]] constexpr bool near_rows_pay(int dim, std::int64_t rows, bool causal, double scores,
                                           std::int64_t resident, std::int64_t resident_of_least) noexcept {
  const double few = dim <= 64 ? 2e6 : causal ? 800e3 : 200e3;
  return rows <= (scores <= few ? 64 : 128) && (resident >= 2 || resident_of_least < 2);
}

struct SplitSizes {
  std::int64_t tiles;       // of queries, of all heads
  std::int64_t key_tiles;   // the most that a query sees
  std::int64_t long_tiles;  // causal: tiles of queries that see more than 3/5 of those, if they come first
  std::int64_t num_sms;     // SMs of the GPU
  std::int64_t resident;    // thread blocks that an SM runs at once
  bool causal;
};

[[nodiscard]] inline SplitKv split_of(std::int64_t begin, std::int64_t end, std::int64_t splits) noexcept {
  return {static_cast<unsigned>(begin), static_cast<unsigned>(end), static_cast<unsigned>(splits)};
}

// The split that should be quickest. Time is counted in tiles of keys. The constants are an H200's (docs/kernel-log.md,
// sm80/forward).
[[nodiscard]] inline SplitKv plan_split(const SplitSizes& sizes) noexcept {
  constexpr double kSplitCost = 6;  // of a split's beginning and end
  constexpr double kAlone = 0.4;    // what an SM achieves with hardly a block; with all that fit: 1
  constexpr std::int64_t kMinTiles = 4;
  const std::int64_t resident = sizes.num_sms * sizes.resident;  // thread blocks that the GPU runs at once
  if (sizes.causal && sizes.long_tiles < sizes.tiles && sizes.tiles >= sizes.num_sms) {
    // Blocks that all run at once take as long as the longest of them alone; more blocks even out by themselves. Where
    // all are long, it is as if nothing were causal.
    return sizes.tiles <= resident && sizes.key_tiles >= 2 * kMinTiles ? split_of(0, sizes.long_tiles, 2) : SplitKv{};
  }
  // The first blocks are dealt out to the SMs one by one, later ones to whichever SM is free, as many as it takes.
  const std::int64_t dealt = sizes.tiles < resident ? sizes.num_sms : resident;
  const std::int64_t whole = sizes.tiles / dealt * dealt;
  const std::int64_t rest = sizes.tiles - whole;
  const std::int64_t most = dealt == resident ? 2 * resident : resident - whole;  // blocks of split tiles
  SplitKv best;
  double least = std::numeric_limits<double>::infinity();
  for (std::int64_t splits = 1; rest > 0 && rest * splits <= most; ++splits) {
    if (splits > 1 && sizes.key_tiles < splits * kMinTiles) {
      break;
    }
    const double length =
        static_cast<double>(common::ceil_div(sizes.key_tiles, splits)) + (splits > 1 ? kSplitCost : 0);
    double cost = length;
    if (dealt == resident) {
      cost *= static_cast<double>(common::ceil_div(rest * splits, resident) * sizes.resident);
    } else {
      const std::int64_t per_sm = common::ceil_div(rest * splits, sizes.num_sms);
      const std::int64_t beside = std::min(whole / sizes.num_sms + per_sm, sizes.resident);
      cost *= static_cast<double>(per_sm) /
              (kAlone + (1 - kAlone) * static_cast<double>(beside) / static_cast<double>(sizes.resident));
    }
    if (cost < least) {
      least = cost;
      best = splits > 1 ? split_of(whole, sizes.tiles, splits) : SplitKv{};
    }
  }
  return best;
}

// How many of `heads` a backward kernel interleaves (cuda/backward_scheduler.cuh): as many as read no more than the L2
// holds beside what is written. Where attention is causal and there are few thread blocks, the longest blocks of the
// last heads would begin late and outlast all others. There so many heads are interleaved that the last ones have two
// blocks for each that the GPU runs at once (docs/kernel-log.md, sm80/backward, step 5).
// ctas: thread blocks, of all heads. resident_ctas: how many run at once; 0: all take as long.
[[nodiscard]] constexpr int interleaved_backward_heads(std::int64_t heads, std::int64_t bytes_per_head,
                                                       std::int64_t ctas, std::int64_t resident_ctas) noexcept {
  constexpr std::int64_t kCacheBytes = std::int64_t{24} << 20;
  constexpr std::int64_t kManyRounds = 12;
  const std::int64_t cached =
      std::clamp(kCacheBytes / std::max(bytes_per_head, std::int64_t{1}), std::int64_t{1}, heads);
  if (ctas >= kManyRounds * resident_ctas) {
    return static_cast<int>(cached);
  }
  const std::int64_t enough = std::max(cached, common::ceil_div(2 * resident_ctas * heads, ctas));
  std::int64_t sets = std::max(heads / enough, std::int64_t{1});
  const auto last = [&] { return heads - common::ceil_div(heads, sets) * (sets - 1); };
  while (sets > 1 && last() < enough) {
    --sets;
  }
  return static_cast<int>(common::ceil_div(heads, sets));
}

// Whether one kernel that makes dK and dV and adds dQ up in any order is quicker than a kernel for either, when so many
// thread blocks are to run of which so many run at once. Two kernels have more to do, but where they run side by side
// (from 9.0 on) one takes the room that the other leaves at its end, which is most where rows are causal
// (docs/kernel-log.md, sm80/backward, steps 6 and 10; measured with as many query heads as KV heads).
[[nodiscard]] constexpr bool adding_dq_pays(int dim, bool causal, std::int64_t ctas, std::int64_t resident_ctas,
                                            bool side_by_side) noexcept {
  const double rounds = dim > 64 ? 4.5 : causal ? 1.5 : 0.6;
  return !side_by_side || static_cast<double>(ctas) >= rounds * static_cast<double>(resident_ctas);
}

}  // namespace distr::cuda::sm80
