// SPDX-License-Identifier: Apache-2.0
// Attention that skips far keys as it goes (method, 8), for sm_90a.
//
//   Operands: q, K and V, and Q~, or q_hat and k_hat, where groups estimate far scores. A block has two consumers of 64
//   queries each, and shares an SM; of more than 64 columns it has three. One warpgroup loads (voted_keys.cuh). Shared
//   memory: SharedStorage (config.h), as in forward.cuh. Pipeline: voting_consumer.cuh. There is one pass.
#pragma once

#include <cstdint>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/voted_keys.cuh"
#include "cuda/sm90/voting_consumer.cuh"

namespace distr::cuda::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    forward_voted(const __grid_constant__ ForwardParameters p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  auto& storage = *reinterpret_cast<SharedStorage<C>*>(memory);
  static_assert(fits<SharedStorage<C>>(C::kCtasPerSm));
  auto& loader = storage.loader;
  if (threadIdx.x == 0) {
    loader.work = p.scheduler.at(blockIdx.x);
    loader.all.fill(p, loader.work);
  }
  if (const Shared<C> shared(storage); threadIdx.x == 0) {
    init_barriers<C>(shared);
  }
  if (!p.is_second) {
    wait_on_dependent_grids();
  }
  launch_dependent_grids();  // after the wait: is_second counts on the first launch's inputs being there
  __syncthreads();
  // Here, as uniform registers do not outlive the divisions of VotedTiles.
  const Shared<C> shared(storage);
  Pass<C> pass{p, loader.work, shared, uniform(loader.all.count()), 0, 0};
  pass.keys = {uniform(loader.all.count_near()), uniform(loader.all.count_special())};
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<C::kRegisters.producer>();
    if (pass.tiles > 0) {
      C::KeyLoader::produce(pass);
    }
    if (p.is_second) {
      wait_on_dependent_grids();
    }
  } else {
    ptx::setmaxnreg_inc<C::kRegisters.consumer>();
    consume_voted<C>(pass);
  }
}

}  // namespace distr::cuda::sm90
