// SPDX-License-Identifier: Apache-2.0
// What the products of a backward are of, and how dQ, dK and dV are made of its sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/gradient_strides.h"
#include "cuda/sm90/backward_convert.h"
#include "cuda/sm90/backward_variants.h"
#include "cuda/sm90/heuristics.h"

namespace distr::cuda::sm90 {

// What the kernel's Q and K are.
enum class Factors : std::uint8_t {
  exact,        // Q and K themselves
  precomputed,  // q_hat and k_hat, of one grouping for the whole sequence
  spread,       // Q~ and K, of blocks with groupings of their own
};

[[nodiscard]] inline Factors factors_of(const Problem& problem, const Grouping& grouping) {
  const bool exact = common::count_exact_rows(problem, grouping) == problem.seq_q;
  return is_by_blocks(problem, grouping)                              ? Factors::spread
         : !exact && num_groups(problem, grouping) < problem.head_dim ? Factors::precomputed
                                                                      : Factors::exact;
}

// Of sums of far keys, or of all, and of near ones.
struct BackwardVariants {
  const BackwardVariant& far;
  const BackwardVariant& near;
};

// Of the sums of a head, in whole tiles.
struct SumRows {
  std::int64_t batch, of_queries, of_keys;
};

struct BackwardConversions {
  Conversion q, k, v;  // but for the pointers
};

[[nodiscard]] inline BackwardConversions conversions_of(const Problem& p, const BackwardParameters& parameters,
                                                        Factors factors, const BackwardVariants& variants,
                                                        const SumRows& rows) {
  const DeviceProblem& device = parameters.problem;
  BackwardConversions result{};
  const bool exact = factors == Factors::exact;
  Conversion r{};
  r.dtype = p.dtype;
  r.batch = rows.batch;
  r.heads = p.heads_q;
  r.blocks = device.blocks;
  r.block = device.block;
  r.first_block_is_exact = device.first_block_is_exact;
  r.groups = device.groups;
  r.members = device.members;
  r.scale = parameters.scale;

  const common::GradientStrides strides = common::gradient_strides(p);
  r.padded_rows = rows.of_queries;
  r.sums[0].columns = variants.far.columns;
  r.sums[0].spread = factors == Factors::spread;
  r.sums[0].share = exact ? Share::all : device.mean ? Share::mean : Share::first;
  r.sums[1] = {nullptr, variants.near.columns, true, nullptr, false, Share::all};
  r.far.count = device.near.means;
  r.far.heads_per_kv = p.heads_q / p.heads_kv;
  r.first_row = std::int64_t{first_query_tile(device, 0)} * kQueryTileRows;
  r.end_row = std::min(std::int64_t{end_query_tile(device, p.seq_k)} * kQueryTileRows, p.seq_q);
  r.heads_per_result = 1;
  r.packed = {device, parameters.lengths, false};
  r.rows = p.seq_q;
  r.columns = static_cast<int>(p.head_dim);
  r.strides = strides.q;
  result.q = r;

  r.first_row = 0;
  r.end_row = p.seq_k;
  r.heads_per_result = p.heads_q / p.heads_kv;
  r.packed.of_keys = true;
  r.rows = p.seq_k;
  r.padded_rows = rows.of_keys;
  r.sums[0] = {nullptr, variants.far.columns, false, nullptr, false, Share::all};
  r.sums[1].has_ds_sums = false;
  r.blocks = 1;
  r.block = std::max(p.seq_k, p.seq_q);
  r.strides = strides.k;
  result.k = r;

  r.sums[0].columns = variants.far.values;
  r.sums[1].columns = variants.near.values;
  r.scale = 1;
  r.columns = static_cast<int>(p.head_dim_v);
  r.strides = strides.v;
  result.v = r;
  return result;
}

}  // namespace distr::cuda::sm90
