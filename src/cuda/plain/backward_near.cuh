// SPDX-License-Identifier: Apache-2.0
// dQ of the plain backward with near keys (method, 8):
//   dQ = scale dS K~
// where K~ of a near key is K, and of a far key k_hat spread over the d columns: its group's, or a member's share of
// it, or for a dropped column the mean over the keys.
//
// As dq_kernel, but that a block of 16 x 16 threads owns 128 columns instead of groups, and meets the near keys before
// the far ones, so that it loads the order once. Shared memory: BackwardShared, as there.
#pragma once

#include "cuda/plain/backward.cuh"

namespace distr::cuda::plain {

// K~ of a far key and column c, which is in group g.
template <class T>
__device__ float spread_k(const TileGroups& groups, bool mean, const float* means, const T* key, int c, int g) {
  if (g >= groups.count) {
    return means == nullptr ? 0.0F : means[c];
  }
  if (!mean && c != groups.column(g, 0)) {
    return 0;
  }
  const float sum = sum_members(groups, key, g, groups.size(g));
  return mean ? sum / static_cast<float>(groups.size(g)) : sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) near_dq_kernel(const __grid_constant__ BackwardArguments arguments) {
  __shared__ BackwardShared shared;
  const DeviceProblem& problem = arguments.problem;
  const Tile tile = find_tile(problem, arguments.tiles, blockIdx.x);
  const int first_column = static_cast<int>(blockIdx.y) * kColumns;
  const int columns = min(kColumns, problem.head_dim - first_column);
  if (tile.rows <= 0) {
    return;
  }
  const T* k = rows_at<T>(arguments.k, problem.k, tile.b, tile.h_kv, 0);
  const float* means =
      problem.near.has_means ? arguments.key_means + key_means_at(problem, tile.b, tile.h_kv, tile.block) : nullptr;
  const SeenKeys keys = seen_keys(problem, tile);
  float r_dq[4][8] = {};
  for (const bool exact : {true, false}) {
    Tile with = tile;
    with.exact = exact;
    const TileGroups groups = load_groups(problem, with, arguments.order, shared.order);
    for (int n = static_cast<int>(threadIdx.x); n < groups.columns; n += kThreads) {
      shared.group[shared.order[n]] = n / groups.members;
    }
    for (std::int64_t first_key = keys.first; first_key < keys.end; first_key += kSide) {
      if (at_keys(problem, tile, first_key).exact != exact) {
        continue;
      }
      float r_s[4][4];
      compute_score_gradients<T>(arguments, with, groups, first_key, Slope::included, shared.staged, r_s);
      store_transposed(r_s, shared.weights);
      for (int staged = 0; staged < kSide; staged += kStagedRows) {
        const std::int64_t first = first_key + staged;
        __syncthreads();
        const bool finite = stage_wide(problem.seq_k - first, columns, true, shared.wide, [&](int key, int column) {
          const int c = first_column + column;
          return spread_k(groups, problem.mean, means, k + (first + key) * problem.k.row, c, shared.group[c]);
        });
        accumulate(shared.weights + staged * kPitch, shared.wide, columns, finite, 0, r_dq);
      }
    }
    if (tile.exact) {
      break;  // there is no order
    }
  }
  const int y = static_cast<int>(threadIdx.x) / 16;
  T* d_q = rows_at<T>(arguments.d_q, arguments.d_q_strides, tile.b, tile.h, tile.first) + first_column;
  for (int row = 0; row < 4; ++row) {
    for (int n = 0; n < 8; ++n) {
      if (4 * y + row < tile.rows && column_of(n) < columns) {
        d_q[(4 * y + row) * arguments.d_q_strides.row + column_of(n)] = from_float<T>(arguments.scale * r_dq[row][n]);
      }
    }
  }
}

}  // namespace distr::cuda::plain
