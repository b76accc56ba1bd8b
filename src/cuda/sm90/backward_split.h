// SPDX-License-Identifier: Apache-2.0
// Blocks of keys that are split into pieces, which share their queries, so that more SMs have one: the last blocks of
// all, where they are fewer than the SMs, or in a launch of near tiles each head's sinks, which meet all queries. What
// pieces find of dK and dV is added in their order (backward_tail.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm90/heuristics.h"

namespace distr::cuda::sm90 {

struct SplitKeys {
  unsigned first;    // the last blocks of all are split from this one on, unless there are sinks
  unsigned sinks;    // of a head, each of which is split
  unsigned pieces;   // of a split block; 1: it is whole
  float *d_k, *d_v;  // in fragments of kKeyTileRows rows, for each piece

  // blocks: of all heads.
  [[nodiscard]] std::int64_t count(std::int64_t blocks, std::int64_t heads) const {
    return sinks == 0 ? blocks - first : heads * sinks;
  }
  [[nodiscard]] std::int64_t thread_blocks(std::int64_t blocks, std::int64_t heads) const {
    return blocks + count(blocks, heads) * (pieces - 1);
  }
};

// What a launch has: blocks of keys of a head, and the tiles of queries that one of those that may be split meets.
struct KeyBlocks {
  std::int64_t heads, of_head, query_tiles;
};

[[nodiscard]] inline SplitKeys split_last(const KeyBlocks& blocks, std::int64_t num_sms, bool are_alike) {
  const std::int64_t all = blocks.heads * blocks.of_head;
  const LastRound last = are_alike ? split_of_last_round(all, blocks.query_tiles, num_sms) : LastRound{all, 1};
  return {static_cast<unsigned>(last.first), 0, static_cast<unsigned>(last.pieces), nullptr, nullptr};
}

[[nodiscard]] inline SplitKeys split_sinks(const KeyBlocks& blocks, std::int64_t num_sms, std::int64_t sinks) {
  const std::int64_t of_head = std::min(sinks, blocks.of_head);
  const std::int64_t pieces = pieces_of_sinks(blocks.heads * of_head, blocks.query_tiles, num_sms);
  return {static_cast<unsigned>(blocks.heads * blocks.of_head), static_cast<unsigned>(of_head),
          static_cast<unsigned>(pieces), nullptr, nullptr};
}

}  // namespace distr::cuda::sm90
