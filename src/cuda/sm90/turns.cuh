// SPDX-License-Identifier: Apache-2.0
// Two consumers start their products by turns, where there are few tiles. Otherwise both may be at the same place of
// their loops at the same time, and the tensor cores wait while both are at their exponentials. With many tiles turns
// gain nothing (docs/kernel-log.md, sm90/forward, step 50).
#pragma once

#include "cuda/sm90/config.h"
#include "cuda/sm90/ptx.cuh"

namespace distr::cuda::sm90 {

// Of one consumer, for one loop: take() before it starts products, give() behind them, end() behind the loop, which has
// as many rounds for both.
template <class C>
class ProductTurns {
 public:
  __device__ ProductTurns(int consumer, int tiles) : own_(1 + consumer), is_used_(tiles <= C::kTilesByTurns) {
    arrive(is_used_ && !is_first());
  }
  __device__ void take() const { wait(is_used_); }
  __device__ void give() const { arrive(is_used_); }
  __device__ void end() const { wait(is_used_ && is_first()); }

 private:
  static constexpr bool kIsPossible = C::kTilesByTurns > 0;  // else no instruction may be left of it
  static constexpr int kThreads = 2 * C::kWarpgroup;

  [[nodiscard]] __device__ bool is_first() const { return own_ == 1; }
  __device__ void wait(bool does) const {
    if constexpr (kIsPossible) {
      ptx::named_barrier_sync_if(does, own_, kThreads);
    }
  }
  __device__ void arrive(bool does) const {
    if constexpr (kIsPossible) {
      ptx::named_barrier_arrive_if(does, 3 - own_, kThreads);
    }
  }

  int own_;  // the barrier that says that it is this consumer's turn: 1 or 2
  bool is_used_;
};

}  // namespace distr::cuda::sm90
