// SPDX-License-Identifier: Apache-2.0
// Key loaders of kernels with near keys (method, 8). Near tiles of K come before far tiles of k_hat.
#pragma once

#include "cuda/sm90/config.h"
#include "cuda/sm90/gather_keys.cuh"
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
};

}  // namespace distr::cuda::sm90
