// SPDX-License-Identifier: Apache-2.0
// Key loaders of kernels with near keys (method, 8). Near tiles of K come before far tiles of k_hat.
#pragma once

#include <cstddef>

#include "cuda/sm90/config.h"
#include "cuda/sm90/gather_keys.cuh"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/tma_keys.cuh"

namespace distr::cuda::sm90 {

// All tiles are K's: far scores are products with Q~, near ones with Q.
struct NearTmaKeys : TmaKeys {
  static constexpr KeyLoad kLoad = KeyLoad::near_tma;
  static constexpr bool kHasNearKeys = true;
  static constexpr int stages(int values) { return values <= 64 ? 4 : 2; }
  template <class C>
  struct Storage {
    SharedTile<typename C::NearQueryTile> near_queries[C::kConsumers];
  };
};

// Far tiles are rows of K^T, those of the block's kept columns. A near tile is all rows of K^T, in pieces of as many as
// a far one has.
struct NearGatherKeys : GatherKeys {
  static constexpr KeyLoad kLoad = KeyLoad::near_gather;
  static constexpr bool kHasNearKeys = true;
  template <class C>
  struct Storage {
    SharedTile<typename C::NearQueryTile> near_queries[C::kConsumers];
    unsigned row_of[C::kColumns];
  };

  template <class C>
  __device__ static void produce(const Pass<C>& pass) {
    const bool issues = is_first_warp() && ptx::elect_one_sync();
    if (pass.used == 0 && issues) {
      load_queries(pass);
    }
    Gatherer<C> gatherer(pass);
#pragma unroll 1
    for (int n = 0; n < pass.tiles; ++n) {
      if (n < pass.near()) {
#pragma unroll 1
        for (int piece = 0; piece < C::kPieces; ++piece) {
          gatherer.load_piece(n, piece);
        }
      } else {
        gatherer.load(n);
      }
      if (is_first_warp() && ptx::elect_one_sync()) {
        load_values(pass, n);
      }
      __syncwarp();
    }
    gatherer.finish();
  }
};

}  // namespace distr::cuda::sm90
