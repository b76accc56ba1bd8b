// SPDX-License-Identifier: Apache-2.0
// Attention to near keys, and then to all far ones (method, 8), in one launch, for sm_90a.
//
//   Operands: near keys have q and K, far ones q_hat and k_hat, which was made beforehand, is gathered by the producer,
//   or is K itself, where q_hat is Q~. What far scores keep of dropped columns is a constant c of a row.
//   A pass has two phases, each of which is a pass of forward.cuh over the tiles of its keys (KeyRuns): the same rings,
//   the same O and row sums.
//     near   S = q K^T           P = 2^(scale S - m)
//     far    S = q_hat k_hat^T   P = 2^(scale (S + c) - m)
//   or, where q_hat has the scale, in the first pass with c in the place of a row max: P = 2^(scale (S - c)) and 2^S.
//   q_hat takes the place of q, once the consumers have q in registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/dependent_launch.cuh"
#include "cuda/near.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/consumer.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/key_runs.cuh"
#include "cuda/sm90/near_result.cuh"
#include "cuda/sm90/pass.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/tma_keys.cuh"

namespace distr::cuda::sm90 {

// Tiles of near keys, in the ring of the far keys' loader, whose full barriers count FarKeys::kArrivals.
template <class FarKeys>
struct NearKeys : TmaKeys {
  static constexpr KeyLoad kLoad = KeyLoad::runs_tma;
  static constexpr unsigned kArrivals = FarKeys::kArrivals;
  static constexpr int stages(int values) { return FarKeys::stages(values); }
  static constexpr Registers registers(int consumers) { return FarKeys::registers(consumers); }

  template <class C>
  __device__ __forceinline__ static void load(const Pass<C>& pass, int n) {
    TmaKeys::load(pass, n);
    for (unsigned i = 1; i < kArrivals; ++i) {
      ptx::barrier_arrive(pass.shared.keys_full(pass.state(n).stage));
    }
  }
};

// Of two tiles, which take turns at a place, the larger one.
template <class A, class B>
using Larger = std::conditional_t<(A::kBytes > B::kBytes), A, B>;

template <class C>
struct NearFarStorage {
  using Near = typename C::Near;
  using Far = typename C::Far;
  SharedTile<Larger<typename Near::QueryTile, typename Far::QueryTile>> queries[C::kConsumers];
  SharedTile<Larger<typename Near::KeyTile, typename Far::KeyTile>> keys[C::kStages];
  SharedTile<typename C::ValueTile> values[C::kStages];
  typename C::KeyLoader::template Storage<Far> loader;
  struct Barriers {
    Barrier queries_full, queries_empty;
    Barrier keys_full[C::kStages], keys_empty[C::kStages];
    Barrier values_full[C::kStages], values_empty[C::kStages];
    typename C::KeyLoader::Barriers loader;
  } barriers;
  float2 shifts[C::kConsumers * kWarpgroup / 4];  // FixedShift's
};

// One phase of such a kernel.
template <class Base, class Both, Phase kPhase_>
struct PhaseConfig : Base {
  using Storage = NearFarStorage<Both>;
  static constexpr Phase kPhase = kPhase_;
  static constexpr bool kFixesRowMax = Both::kFixesRowMax;
  // With polynomials ptxas would serialize wgmma (C7512; docs/kernel-log.md, sm90/forward, step 84).
  static constexpr bool by_polynomial(int /*i*/) { return false; }
};

// Both. kColumns: of q_hat and k_hat; FarKeys: a loader of runs.
template <class T, int kNearColumns_, int kColumns, int kValues, ScaleIn kScaleIn, class FarKeys, class Stages>
struct NearFarConfig : Config<T, kColumns, kValues, 2, kScaleIn, FarKeys, 1, Stages> {
  using Far = PhaseConfig<Config<T, kColumns, kValues, 2, kScaleIn, FarKeys, 1, Stages>, NearFarConfig, Phase::far>;
  static constexpr int kNearColumns = kNearColumns_;
  using Near = PhaseConfig<Config<T, kNearColumns, kValues, 2, ScaleIn::softmax, NearKeys<FarKeys>, 1, Stages>,
                           NearFarConfig, Phase::near>;
  using Storage = NearFarStorage<NearFarConfig>;
  static_assert(!Near::kQueriesInShared);                                   // else q_hat has no place
  static_assert(!FarKeys::kTransposed || Far::kKeys == common::kNearTile);  // a tile is gathered in one run
  static_assert(Near::kStages == Far::kStages && Near::kKeys == Far::kKeys);
};

// A phase of a pass, behind so many uses of the rings. Its keys are found when it begins, as beside the tiles of
// another phase there are no registers for them.
template <class C>
[[nodiscard]] __device__ __forceinline__ Pass<C> begin_phase(const ForwardParameters& p, const WorkTile& work,
                                                             const Shared<C>& shared, int used) {
  Pass<C> pass{p, work, shared, 0, 0, used};
  count_tiles(pass);
  return pass;
}

inline constexpr int kProducersBarrier = 1;  // consumers have the next ones (Stagger)

// What the producer warpgroup does in a pass, the index-th. Returns how often the rings were used until its end.
template <class C>
__device__ __forceinline__ int produce_near_far(const Pass<typename C::Near>& near, const Pass<typename C::Far>& far,
                                                unsigned index) {
  using Keys = typename C::KeyLoader;
  const bool issues = is_first_warp() && ptx::elect_one_sync();
  if (issues) {
    load_queries(near);
    NearKeys<Keys>::load_tiles(near);
    ptx::barrier_wait(near.shared.queries_empty(), index % 2);
    load_queries(far);
  }
  if constexpr (Keys::kTransposed) {
    // Those who have loaded nothing may not run ahead: a barrier tells this phase from the last one, not from others.
    __syncwarp();
    ptx::named_barrier_sync(kProducersBarrier, kWarpgroup);
    Keys::load_tiles(far);
  } else if (issues) {
    Keys::load_tiles(far);
  }
  if (index == 0 && issues) {
    prefetch_next<typename C::Near>(near.p);
  }
  __syncwarp();
  return far.used + far.tiles;
}

// The row max of near keys that is known beforehand: c, from which far keys' P = 2^S is measured.
template <class C>
__device__ __forceinline__ void enter_near(const ForwardParameters& p, const WorkTile& work, int first_row,
                                           Softmax<typename C::Near>& near) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    near.row_max[half] = dropped_of(p, work, std::int64_t{first_row} + half * 8);
  }
}

// From near keys to far ones: the row max, if they have one, and sums that far scores go on with.
template <class C>
__device__ __forceinline__ void enter_far(const ForwardParameters& p, const WorkTile& work, int first_row,
                                          bool is_first, const Softmax<typename C::Near>& near,
                                          Softmax<typename C::Far>& far) {
  __syncwarp();  // all lanes are through with the near keys' FixedShift
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    far.row_sum[half] = near.row_sum[half];
    if (C::kFixesRowMax || !is_first) {
      const float above = near.row_max[half] - dropped_of(p, work, std::int64_t{first_row} + half * 8);
      const float row_max = isnan(above) ? -INFINITY : above;  // an online row max would stay NaN; the row sum says so
      far.row_max[half] = C::kFixesRowMax ? row_max : row_max * near.scale;
      far.row_sum[half] *= isnan(above) && near.row_sum[half] != 0.0F ? above : 1.0F;
    }
  }
}

// And the end of both: the row sums, and the row max for LSE, which is asked for where scores have one.
template <class C>
__device__ __forceinline__ void leave_far(const ForwardParameters& p, const WorkTile& work, int first_row,
                                          const Softmax<typename C::Far>& far, Softmax<typename C::Near>& near) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    near.row_sum[half] = far.row_sum[half];
    near.row_max[half] = C::kScaleIn == ScaleIn::queries
                             ? 0.0F
                             : far.row_max[half] + dropped_of(p, work, std::int64_t{first_row} + half * 8);
  }
}

// Where a block has no far keys: those of a thread's rows whose sum is not too small, a bit each, or that do not exist.
template <class C>
[[nodiscard]] __device__ inline unsigned rows_of_enough(const Softmax<C>& softmax, int row, std::int64_t row_end) {
  unsigned rows = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool is_enough = quad_sum(softmax.row_sum[half]) > Softmax<C>::kMinSum;
    rows |= is_enough || !C::Stages::kRepeatsRows || row + half * 8 >= row_end ? 1U << half : 0;
  }
  return rows;
}

// All passes of a consumer.
template <class C>
__device__ __forceinline__ void consume_near_far(const ForwardParameters& p, WorkTile work,
                                                 typename C::Storage& storage) {
  using Near = typename C::Near;
  using Far = typename C::Far;
  const int consumer = uniform(static_cast<int>(threadIdx.x) / kWarpgroup) - C::kFirstConsumer;
  const int row = work.row + consumer * 64 + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
                  static_cast<int>(threadIdx.x) % 32 / 4;
  int used = 0;
  bool is_first = true;
  const auto mode = [&](RowMax of_first) {  // opaque: see consume_all()
    return static_cast<RowMax>(ptx::opaque(static_cast<unsigned>(is_first ? of_first : RowMax::online)));
  };
  unsigned rows_left = kAllRows;
  do {
    float o[C::kValues / 2];
#pragma unroll
    for (float& x : o) {
      x = ptx::opaque(0.0F);
    }
    const Shared<Near> for_near(storage);
    Softmax<Near> softmax(p.listed.near_scale_log2);
    if (!C::kFixesRowMax && is_first) {
      enter_near<C>(p, work, row, softmax);
    }
    unsigned in_range = kAllRows;
    if (const Pass<Near> near = begin_phase(p, work, for_near, used); near.tiles > 0) {
      in_range = consume<Near>(near, consumer, row, mode(kFirstPass<Near>), o, softmax);
      used += near.tiles;
    } else {
      pass_over_queries(for_near);
    }
    work.row = static_cast<int>(ptx::opaque(static_cast<unsigned>(work.row)));
    const Shared<Far> for_far(storage);
    if (const Pass<Far> far = begin_phase(p, work, for_far, used); far.tiles > 0) {
      Softmax<Far> of_far(p.problem.scale_log2);
      enter_far<C>(p, work, row, is_first, softmax, of_far);
      in_range &= consume<Far>(far, consumer, row, mode(kFirstPass<Far>), o, of_far);
      leave_far<C>(p, work, row, of_far, softmax);
      used += far.tiles;
    } else {
      pass_over_queries(for_far);
      if (!C::kFixesRowMax && is_first) {
        in_range &= rows_of_enough(softmax, row, p.row_end);
      }
    }
    const Pass<Near> pass{p, work, for_near, 0, 0, 0};
    store<Near>(pass, row, rows_left & in_range, o, softmax, is_first ? 1.0F : kHeadroom<C>);
    rows_left &= ~in_range;
    is_first = false;
  } while (__syncthreads_or(static_cast<int>(rows_left)) != 0);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) forward_near_far(const __grid_constant__ ForwardParameters p) {
  using Near = typename C::Near;
  using Far = typename C::Far;
  extern __shared__ __align__(1024) std::uint8_t memory[];
  auto& storage = *reinterpret_cast<typename C::Storage*>(memory);
  static_assert(fits<typename C::Storage>(1));
  const WorkTile work = p.scheduler.at(blockIdx.x);
  const Shared<Near> for_near(storage);
  const Shared<Far> for_far(storage);
  if (threadIdx.x == 0) {
    ptx::barrier_init(for_near.queries_empty(), 4 * C::kConsumers);
    init_barriers<Far>(for_far);
  }
  wait_on_dependent_grids();
  launch_dependent_grids();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<C::kRegisters.producer>();
    Pass<Near> near = begin_phase(p, work, for_near, 0);
    Pass<Far> far = begin_phase(p, work, for_far, near.tiles);
    unsigned index = 0;
    do {
      near.used = produce_near_far<C>(near, far, index);
      far.used = near.used + near.tiles;
      ++index;
    } while (__syncthreads_or(0) != 0);
  } else {
    ptx::setmaxnreg_inc<C::kRegisters.consumer>();
    consume_near_far<C>(p, work, storage);
  }
}

}  // namespace distr::cuda::sm90
