// SPDX-License-Identifier: Apache-2.0
// The forward with near keys and skipped halves of tiles (method, 8), by mma.sync, for sm_80 and later.
//
//   A thread block takes kRows rows of a head, whose near keys are the same, and each of its 4 warps 16 kRowTiles of
//   them. Rows 64 i .. 64 i + 63 skip together. Keys are met 64 at a time, half a tile: the near ones first, then the
//   far ones (near_keys.cuh).
//     S = Q K^T    from all columns where keys are near, else from those that are kept, which come first in Q and K^T
//     vote         64 rows without a score above L_i + log2 p leave a far half at that: no exponentials, no V
//     P, O += P V  with `finish` behind scores from all columns
//   What the means of dropped columns add to a row's far scores is a constant: it is taken from the row max before the
//   first far half, and given back at the end. The row max is online, but in far halves of which nothing is hidden or
//   skipped, at G = 2 and 4, it is what near keys have left. Rows for which that does not do, whose scores are very
//   large or whose O is not finite are taken once more, with scores scaled beforehand, an online row max and kHeadroom
//   for V. Shared memory: NearStorage (near_storage.cuh). Pipeline: while half n is computed cp.async copies half n
//   + 1 (near_copies.cuh). There is one barrier for each half, and one of the warps that vote.
#pragma once

#include "cuda/sm80/near_copies.cuh"
#include "cuda/sm80/near_task.cuh"

namespace distr::cuda::sm80 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, kNearCtasPerSm<C>)
    near_forward(const __grid_constant__ NearParameters parameters) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& storage = *reinterpret_cast<NearStorage<C>*>(shared);
  static_assert(sizeof(NearStorage<C>) <= kMaxSharedBytes);
  launch_dependent_grids();
  wait_on_dependent_grids();
  const ForwardParameters& p = parameters.forward;
  const DeviceProblem& problem = p.problem;
  NearState& state = storage.state;
  if (threadIdx.x == 0) {
    const Work work = Work::of(blockIdx.x, p, C{});
    const bool exact = problem.exact || (problem.first_block_is_exact && work.row < problem.block);
    const std::int64_t head = static_cast<std::int64_t>(work.batch) * problem.heads_kv + work.head_kv;
    const Positions positions(problem, exact);
    state.work = work;
    state.positions = positions;
    state.segments.make(problem, near_tiles(problem, work.row, std::int64_t{work.last} * C::kKeys), positions,
                        work.last, first_whole_tile<C>(problem, work), unmasked_tiles<C>(p, work));
    state.keys = static_cast<const std::uint16_t*>(p.k) + head * (problem.head_dim + 1) * p.column_stride;
    state.values = head_of(p.v, problem.v, work.batch, work.head_kv);
    state.repeats = false;
  }
  __syncthreads();
  NearTask<C> task(parameters, storage);
  task.load_queries();
  task.store_dropped();
  __syncthreads();

  const HalfCopies<C> copies(parameters, storage);
  storage.rows[threadIdx.x] = kAllRows<C>;
  bool again = false;
  do {
    float o[C::kRowTiles][C::kDim / 8][4] = {};
    task.begin_pass();
    Softmax<C> softmax(task.scales_scores() ? 1.0F : problem.scale_log2);
    if (counts_halves<C>(parameters)) {
      begin_counts<C>(storage.counts[voters_of<C>(ptx::opaque(threadIdx.x))], p, state.work);
    }
    int stage = 0;
    copies.issue(state.segments.of[0].begin, stage, state.segments.of[0].copied_steps);
#pragma unroll 1
    for (int n = 0; state.segments.of[n].exists(); ++n) {
      const typename NearTask<C>::Segment segment = state.segments.of[n];
      if (segment.begins_far) {  // the near keys are behind us
        begin_far_keys<C>(p, state.work.row, storage, softmax);
      }
#pragma unroll 1
      for (int half = segment.begin; half < segment.end; ++half) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the half has arrived, and no warp reads the other stage any more
        if (task.repeats()) {
          make_headroom<C>(storage.stages.values[stage]);
        }
        const bool is_last = half + 1 == segment.end;
        copies.issue(is_last ? state.segments.of[n + 1].begin : half + 1, 1 - stage,
                     is_last ? state.segments.of[n + 1].copied_steps : segment.copied_steps);
        task.visit(segment, half, stage, o, softmax);
        stage = 1 - stage;
      }
    }
    ptx::cp_async_wait<0>();
    const bool has_far = state.segments.has_far();
    if (has_far && problem.near.keeps_means) {
      each_row<C>([&](int tile, int eight, int row) { softmax.row_max[tile][eight] += storage.dropped[row]; });
    }
    const bool repeats = state.repeats;
    const unsigned in_range = repeats ? kAllRows<C> : rows_in_range<C>(o, softmax, task.has_mask() ? kAllTiles : 1, 1);
    const unsigned rows = storage.rows[ptx::opaque(threadIdx.x)];
    store<C>(p, state.work, task.first_row(), rows & in_range, o, softmax, repeats ? kHeadroom<C> : 1.0F);
    storage.rows[ptx::opaque(threadIdx.x)] = static_cast<std::uint8_t>(rows & ~in_range);
    again = __syncthreads_or(static_cast<int>(rows & ~in_range)) != 0;
    if (again) {
      if (threadIdx.x == 0) {
        state.repeats = true;
      }
      __syncthreads();  // before the next pass reads it
    }
  } while (again);
  if (counts_halves<C>(parameters)) {
    store_counts<C>(storage.counts[voters_of<C>(ptx::opaque(threadIdx.x))], parameters, state.work);
  }
}

}  // namespace distr::cuda::sm80
