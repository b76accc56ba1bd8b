// SPDX-License-Identifier: Apache-2.0
// How the CPU cuts a problem into tasks and tiles. All of it follows from the problem alone, so that the results have
// the same bits for any number of threads, but for the rows of a forward's task, on which no row's bits depend: how
// keys are split does not follow from them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/near.h"
#include "cpu/heuristics.h"
#include "kernel.h"

namespace distr::cpu {

static_assert(kTileKeys == common::kNearTile, "the keys of a tile are near or far together");
static_assert(kTileQueries % common::kSkipRows == 0 && kTaskQueries % common::kSkipRows == 0,
              "rows that are skipped together are of one tile");
// Rows of tiles are padded to the longest vector there is, 64 bytes.
inline constexpr std::int64_t kPadding = 16;

[[nodiscard]] inline std::int64_t padded(std::int64_t count) { return common::ceil_div(count, kPadding) * kPadding; }

// What products read: floats, or pairs of bf16 whose products are summed at once, by AVX512_BF16 or in the tile
// registers of AMX.
enum class Products : std::uint8_t { of_floats, of_pairs, of_pairs_in_tiles };

// Rows of queries whose scores go from product to softmax to P V together.
constexpr std::int64_t rows_per_step(Products products) {
  return products == Products::of_pairs_in_tiles ? kRowsPerStepOfTiles : kRowsPerStep;
}

// A task's rows: whole blocks where blocks are short, a part of one block where they are long, and the most there may
// be whatever the blocks are where keys are near or far.
struct QueryTile {
  std::int64_t b, h, first, rows;
};

// How a head's rows are cut into tiles of so many queries at most.
struct RowCut {
  RowCut(const Problem& problem, const Grouping& grouping, std::int64_t rows) {
    const std::int64_t block = is_exact(grouping) ? problem.seq_q : std::min(grouping.block, problem.seq_q);
    if (common::has_near_keys(grouping)) {
      span = rows;
    } else if (block <= rows && !is_exact(grouping)) {
      span = block * (rows / std::max<std::int64_t>(block, 1));
    } else {
      span = block;
    }
    tiles_per_span = common::ceil_div(span, rows);
    tile_rows = tiles_per_span == 0 ? 0 : common::ceil_div(span, tiles_per_span);  // 129 + 128, not 256 + 1
    tiles_per_head = span == 0 ? 0 : common::ceil_div(problem.seq_q, span) * tiles_per_span;
  }

  std::int64_t span;  // rows that tiles must not straddle the ends of
  std::int64_t tiles_per_span;
  std::int64_t tile_rows;
  std::int64_t tiles_per_head;
};

class ForwardTiling {
 public:
  // Tiles have `rows` queries at most.
  ForwardTiling(const Problem& problem, const Grouping& grouping, std::int64_t rows)
      : problem_(problem), rows_(rows), cut_(problem, grouping, rows) {
    // Whatever `rows` is, as a row's bits depend on how its keys are split.
    const std::int64_t tiles = problem.batch * problem.heads_q * RowCut(problem, grouping, kTileQueries).tiles_per_head;
    // What is skipped depends on all near keys of a row, so one task takes all keys of its rows then.
    if (tiles > 0 && tiles < kEnoughTasks && grouping.skip == 0) {
      const std::int64_t wanted =
          std::min(common::ceil_div(kEnoughTasks, tiles), std::max<std::int64_t>(1, problem.seq_k / kMinimumSplit));
      split_keys_ = common::ceil_div(common::ceil_div(problem.seq_k, wanted), kTileKeys) * kTileKeys;
      splits_ = std::max<std::int64_t>(1, common::ceil_div(problem.seq_k, std::max<std::int64_t>(split_keys_, 1)));
    }
    if (splits_ == 1) {
      split_keys_ = problem.seq_k;
    }
  }

  [[nodiscard]] std::int64_t num_tiles() const { return problem_.batch * problem_.heads_q * cut_.tiles_per_head; }
  [[nodiscard]] std::int64_t tiles_per_head() const { return cut_.tiles_per_head; }
  [[nodiscard]] std::int64_t splits() const { return splits_; }
  [[nodiscard]] std::int64_t num_tasks() const { return num_tiles() * splits_; }
  [[nodiscard]] std::int64_t split_keys() const { return split_keys_; }
  // A split task leaves O not yet divided by the row sums, then the rows' maxima and sums.
  [[nodiscard]] std::int64_t partial_floats() const { return rows_ * (padded(problem_.head_dim_v) + kPadding); }

  // Tile `index`; the last of a head come first, for they see the most keys when causal. Some have no rows.
  [[nodiscard]] QueryTile tile(std::int64_t index) const {
    const std::int64_t head = index / cut_.tiles_per_head;
    const std::int64_t in_head = cut_.tiles_per_head - 1 - index % cut_.tiles_per_head;
    const std::int64_t span = in_head / cut_.tiles_per_span;
    const std::int64_t first = span * cut_.span + in_head % cut_.tiles_per_span * cut_.tile_rows;
    const std::int64_t end = std::min({first + cut_.tile_rows, (span + 1) * cut_.span, problem_.seq_q});
    return {head / problem_.heads_q, head % problem_.heads_q, first, std::max<std::int64_t>(0, end - first)};
  }

 private:
  const Problem& problem_;
  std::int64_t rows_;
  RowCut cut_;
  std::int64_t splits_ = 1;
  std::int64_t split_keys_ = 0;
};

// More threads than tasks need no workspace of their own.
[[nodiscard]] inline std::int64_t useful_threads(int threads, std::int64_t tasks) {
  return std::min<std::int64_t>(threads, tasks);
}

// Floats of the scratch that holds k_hat of a tile. Of pairs it holds what the means of the keys add to scores, and the
// dropped columns when scores are finished, too.
[[nodiscard]] inline std::int64_t k_hat_floats(const Problem& problem, const Grouping& grouping, Products products) {
  const std::int64_t pairs = products == Products::of_floats ? 0 : common::ceil_div(problem.head_dim, 2) + 2;
  return is_exact(grouping) ? 0 : std::max(num_groups(problem, grouping), pairs) * kTileKeys;
}

// Words from row to row of a forward's q_hat: all columns, and of pairs two words more that the means of the keys need.
[[nodiscard]] inline std::int64_t query_stride(const Problem& problem, Products products) {
  return padded(products == Products::of_floats ? problem.head_dim : common::ceil_div(problem.head_dim, 2) + 2);
}

// Where a thread's tiles lie in its part of the workspace, in floats.
struct ForwardScratch {
  ForwardScratch(const Problem& problem, const Grouping& grouping, Products products) {
    const std::int64_t queries = kTaskQueries * query_stride(problem, products);
    const std::int64_t dv = padded(problem.head_dim_v);
    q_hat = take(queries);
    q = take(common::has_near_keys(grouping) && !is_exact(grouping) ? queries : 0);
    k_transposed = take(padded(problem.head_dim) * kTileKeys);
    k_hat = take(k_hat_floats(problem, grouping, products));
    v = take(kTileKeys * dv);
    p = take(products == Products::of_floats ? 0 : rows_per_step(products) * kTileKeys);
    // Where halves are skipped, no segment has more than 64 rows.
    scores = take((grouping.skip > 0 ? common::kSkipRows : rows_per_step(products)) * kTileKeys);
    o = take(kTaskQueries * dv);
    sums = take(kTaskQueries * kPadding);
  }

  std::int64_t q_hat, q, k_transposed, k_hat, v, p, scores, o, sums;
  std::int64_t total = 0;

 private:
  std::int64_t take(std::int64_t floats) {
    total += floats;
    return total - floats;
  }
};

[[nodiscard]] inline std::size_t bytes_of(std::int64_t floats) {
  return static_cast<std::size_t>(floats) * sizeof(float);
}

// A plan of so many tasks, without its workspace, whose parts lie at multiples of a row's padding.
template <class Tensors>
[[nodiscard]] KernelPlan<Tensors> plan_of(const Problem& problem, const Grouping& grouping, std::int64_t tasks,
                                          std::int64_t threads, std::int64_t rows = kTileQueries) {
  const TileShape tile{rows, kTileKeys, problem.head_dim,
                       is_exact(grouping) ? problem.head_dim : num_groups(problem, grouping)};
  return {WorkspaceLayout(bytes_of(kPadding)), {{tile, tasks, threads, 0}}, {tile}, {}};
}

}  // namespace distr::cpu
