// SPDX-License-Identifier: Apache-2.0
// O = softmax(scale * q_hat k_hat^T) V with wgmma and the copy engine, for sm_90a (paper, Section 3.3), on q_hat and
// k_hat that were made beforehand: exact attention, and one grouping for the whole sequence.
//
//   A thread block takes kRows queries of one head. One thread of its first warpgroup copies q_hat and then tile after
//   tile of k_hat and V to shared memory, two stages of each. Every other warpgroup owns 64 queries:
//     S_0 = q_hat k_hat_0^T, P_0
//     for the next tiles j:
//       S_j = q_hat k_hat_j^T and O += P_(j-1) V_(j-1)    both started, on the tensor cores
//       softmax of S_j, as soon as it is there            while the second product still runs
//       O rescaled where a reference has moved, P_j packed
//     O += P V of the last tile
//     O / rowsum, LSE
//   Two consumers take turns in starting their products, so that one's softmax runs under the other's.
#pragma once

#include "cuda/rows.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/softmax.cuh"

namespace distr::cuda::sm90 {

// The bits of wgmma's descriptors for the permutation of rows of 128, 64 and 32 bytes.
template <class P>
__device__ constexpr std::uint64_t layout_bits() {
  constexpr std::uint64_t kMode = P::kRowBytes == 128 ? 1 : P::kRowBytes == 64 ? 2 : 3;
  return kMode << 62;
}

// Columns 16 step .. of all rows of a tile whose rows lie along k.
template <class P>
__device__ __forceinline__ std::uint64_t along_k(std::uint32_t tile, int step) {
  constexpr int kStepsAPanel = P::kPanelColumns / 16;
  const std::uint32_t start =
      tile + static_cast<std::uint32_t>(step / kStepsAPanel * P::kPanelBytes + step % kStepsAPanel * 32);
  constexpr std::uint64_t kEightRows = 8 * P::kRowBytes / 16;
  return layout_bits<P>() | kEightRows << 32 | std::uint64_t{1} << 16 | (start & 0x3FFFF) >> 4;
}

// Rows 16 step .. of all columns of a tile whose columns lie along k.
template <class P>
__device__ __forceinline__ std::uint64_t across_k(std::uint32_t tile, int step) {
  static_assert(P::kRowBytes == 128);
  const std::uint32_t start = tile + static_cast<std::uint32_t>(step * 16 * P::kRowBytes);
  constexpr std::uint64_t kEightRows = 8 * P::kRowBytes / 16;
  constexpr std::uint64_t kNextPanel = P::kPanelBytes / 16;
  return layout_bits<P>() | kEightRows << 32 | kNextPanel << 16 | (start & 0x3FFFF) >> 4;
}

// Where things are in shared memory.
template <class C>
struct Shared {
  std::uint32_t base;
  std::uint32_t barriers;

  [[nodiscard]] __device__ std::uint32_t queries(int consumer) const {
    return base + static_cast<std::uint32_t>(consumer * C::QueryTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t keys(int stage) const {
    return queries(C::kConsumers) + static_cast<std::uint32_t>(stage * C::KeyTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t values(int stage) const {
    return keys(C::kStages) + static_cast<std::uint32_t>(stage * C::ValueTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t queries_full() const { return barriers; }
  [[nodiscard]] __device__ std::uint32_t keys_full(int stage) const { return barrier(0, stage); }
  [[nodiscard]] __device__ std::uint32_t keys_empty(int stage) const { return barrier(1, stage); }
  [[nodiscard]] __device__ std::uint32_t values_full(int stage) const { return barrier(2, stage); }
  [[nodiscard]] __device__ std::uint32_t values_empty(int stage) const { return barrier(3, stage); }

  static constexpr int kBarriers = 1 + 4 * C::kStages;

 private:
  [[nodiscard]] __device__ std::uint32_t barrier(int kind, int stage) const {
    return barriers + static_cast<std::uint32_t>(8 * (1 + kind * C::kStages + stage));
  }
};

// The n-th use of a ring of kStages buffers.
template <class C>
struct Turn {
  int stage;
  unsigned parity;  // of the phase that its use ends
  __device__ explicit Turn(int n) : stage(n % C::kStages), parity(static_cast<unsigned>(n / C::kStages) % 2) {}
};

template <class P>
__device__ inline void copy_tile(std::uint32_t tile, const CUtensorMap& map, std::uint32_t barrier, int row, int head,
                                 int batch) {
#pragma unroll
  for (int panel = 0; panel < P::kCount; ++panel) {
    ptx::copy_box(tile + static_cast<std::uint32_t>(panel * P::kPanelBytes), map, barrier, panel * P::kPanelColumns,
                  row, head, batch);
  }
}

// Tiles are taken from the last to the first, so that those with a mask come first.
template <class C>
__device__ inline void copy_all(const ForwardParameters& p, const Rows& work, const Shared<C>& shared, int tiles) {
  ptx::barrier_arrive_expect(shared.queries_full(), C::kConsumers * C::QueryTile::kBytes);
  for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
    copy_tile<typename C::QueryTile>(shared.queries(consumer), p.q, shared.queries_full(), work.row + 64 * consumer,
                                     work.head, work.batch);
  }
  const int key_head = p.keys_of_query_head ? work.head : work.head_kv;
  for (int n = 0; n < tiles; ++n) {
    const Turn<C> turn(n);
    const int row = (tiles - 1 - n) * C::kKeys;
    ptx::barrier_wait(shared.keys_empty(turn.stage), turn.parity ^ 1);
    ptx::barrier_arrive_expect(shared.keys_full(turn.stage), C::KeyTile::kBytes);
    copy_tile<typename C::KeyTile>(shared.keys(turn.stage), p.k, shared.keys_full(turn.stage), row, key_head,
                                   work.batch);
    ptx::barrier_wait(shared.values_empty(turn.stage), turn.parity ^ 1);
    ptx::barrier_arrive_expect(shared.values_full(turn.stage), C::ValueTile::kBytes);
    copy_tile<typename C::ValueTile>(shared.values(turn.stage), p.v, shared.values_full(turn.stage), row, work.head_kv,
                                     work.batch);
  }
}

// Starts S = q_hat k_hat^T.
template <class C>
__device__ __forceinline__ void start_scores(float (&s)[C::kKeys / 2], std::uint32_t queries, std::uint32_t keys) {
#pragma unroll
  for (int step = 0; step < C::kScores / 16; ++step) {
    ptx::wgmma(s, along_k<typename C::QueryTile>(queries, step), along_k<typename C::KeyTile>(keys, step), step > 0,
               typename C::Element{});
  }
  ptx::wgmma_commit();
}

// Starts O += P V.
template <class C>
__device__ __forceinline__ void start_output(float (&o)[C::kValues / 2],
                                             const std::uint32_t (&probabilities)[C::kKeys / 16][4],
                                             std::uint32_t values) {
#pragma unroll
  for (int step = 0; step < C::kKeys / 16; ++step) {
    ptx::wgmma_rs(o, probabilities[step], across_k<typename C::ValueTile>(values, step), typename C::Element{});
  }
  ptx::wgmma_commit();
}

template <class C>
__device__ inline void store(const ForwardParameters& p, const Rows& work, int first_row,
                             const float (&o)[C::kValues / 2], const Softmax<C>& softmax) {
  using T = typename C::Element;
  const DeviceProblem& problem = p.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* const base = static_cast<T*>(p.o) + work.batch * problem.o.batch + work.head * problem.o.head;
  const bool pairs = (reinterpret_cast<std::uintptr_t>(base) % 4 == 0) && problem.o.row % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = std::int64_t{first_row} + half * 8;
    const float sum = quad_sum(softmax.sum[half]);
    if (row >= p.row_end) {
      continue;
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      p.lse[(work.batch * problem.heads_q + work.head) * problem.seq_q + row] =
          natural_lse(softmax.reference[half], softmax.scale, sum);
    }
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;  // no key is seen: O = 0
    T* const to = base + row * problem.o.row;
#pragma unroll
    for (int n = 0; n < C::kValues / 8; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      const float low = o[n * 4 + half * 2] * inverse;
      const float high = o[n * 4 + half * 2 + 1] * inverse;
      if (pairs && column + 1 < problem.head_dim_v) {
        *reinterpret_cast<std::uint32_t*>(to + column) = ptx::pack(low, high, T{});
      } else {
        if (column < problem.head_dim_v) {
          to[column] = T(low);
        }
        if (column + 1 < problem.head_dim_v) {
          to[column + 1] = T(high);
        }
      }
    }
  }
}

// A consumer's 64 queries.
template <class C>
__device__ __forceinline__ void compute(const ForwardParameters& p, const Rows& work, const Shared<C>& shared,
                                        int tiles) {
  const int consumer = static_cast<int>(threadIdx.x) / C::kWarpgroup - 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = work.row + consumer * 64 + static_cast<int>(threadIdx.x) % C::kWarpgroup / 32 * 16 + lane / 4;
  const DeviceProblem& problem = p.problem;

  float o[C::kValues / 2] = {};
  Softmax<C> softmax(problem.scale_log2);
  if (tiles > 0) {
    // Tiles that every row of the block sees whole.
    const std::int64_t seen =
        problem.causal ? min(problem.seq_k, max(work.row + problem.causal_offset + 1, std::int64_t{0})) : problem.seq_k;
    const int whole = static_cast<int>(seen / C::kKeys);
    const auto release = [&](std::uint32_t barrier) {
      if (lane == 0) {
        ptx::barrier_arrive(barrier);
      }
    };
    constexpr int kBoth = 2 * C::kWarpgroup;
    const auto my_turn = [&] {
      if constexpr (C::kConsumers == 2) {
        ptx::named_sync(1 + consumer, kBoth);
      }
    };
    const auto your_turn = [&] {
      if constexpr (C::kConsumers == 2) {
        ptx::named_arrive(2 - consumer, kBoth);
      }
    };
    if (consumer == 1) {
      your_turn();
    }

    float s[C::kKeys / 2];
    float factor[2];
    std::uint32_t probabilities[C::kKeys / 16][4];
    ptx::barrier_wait(shared.queries_full(), 0);
    ptx::barrier_wait(shared.keys_full(0), 0);
    my_turn();
    ptx::wgmma_fence();
    start_scores<C>(s, shared.queries(consumer), shared.keys(0));
    your_turn();
    ptx::wgmma_wait<0>();
    release(shared.keys_empty(0));
    if (tiles - 1 >= whole) {
      apply_mask<C>(s, problem, row, (tiles - 1) * C::kKeys);
    }
    static_cast<void>(softmax.update(s, factor));
    pack<C>(s, probabilities);

    for (int n = 1; n < tiles; ++n) {
      const Turn<C> turn(n);
      const Turn<C> before(n - 1);
      ptx::barrier_wait(shared.keys_full(turn.stage), turn.parity);
      my_turn();
      ptx::wgmma_fence();
      start_scores<C>(s, shared.queries(consumer), shared.keys(turn.stage));
      ptx::barrier_wait(shared.values_full(before.stage), before.parity);
      start_output<C>(o, probabilities, shared.values(before.stage));
      your_turn();
      ptx::wgmma_wait<1>();
      release(shared.keys_empty(turn.stage));
      if (tiles - 1 - n >= whole) {
        apply_mask<C>(s, problem, row, (tiles - 1 - n) * C::kKeys);
      }
      const bool follow = softmax.update(s, factor);
      // Always so, which the compiler cannot see: in a block of its own the wait stays behind the exponentials.
      if (ptx::opaque(static_cast<unsigned>(n)) < static_cast<unsigned>(tiles)) {
        ptx::wgmma_wait<0>();
      }
      if (follow) {
#pragma unroll
        for (int i = 0; i < C::kValues / 2; ++i) {
          o[i] *= factor[i / 2 % 2];
        }
      }
      release(shared.values_empty(before.stage));
      pack<C>(s, probabilities);
    }
    const Turn<C> last(tiles - 1);
    ptx::barrier_wait(shared.values_full(last.stage), last.parity);
    ptx::wgmma_fence();
    start_output<C>(o, probabilities, shared.values(last.stage));
    ptx::wgmma_wait<0>();
    if (consumer == 0) {
      my_turn();  // the other's last one
    }
  }
  store<C>(p, work, row, o, softmax);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) forward(const __grid_constant__ ForwardParameters p) {
  extern __shared__ std::uint8_t memory[];
  __shared__ std::uint64_t barriers[Shared<C>::kBarriers];
  const std::uint32_t base = (ptx::shared_address(memory) + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  const Shared<C> shared{base, ptx::shared_address(barriers)};

  const Rows work = Rows::of(blockIdx.x, C::kRows, p);
  const DeviceProblem& problem = p.problem;
  std::int64_t keys = problem.seq_k;
  if (problem.causal) {
    const std::int64_t last = min(std::int64_t{work.row} + C::kRows, p.row_end) - 1;
    keys = min(max(last + problem.causal_offset + 1, std::int64_t{0}), problem.seq_k);
  }
  const int tiles = static_cast<int>((keys + C::kKeys - 1) / C::kKeys);

  if (threadIdx.x == 0) {
    ptx::barrier_init(shared.queries_full(), 1);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::barrier_init(shared.keys_full(stage), 1);
      ptx::barrier_init(shared.values_full(stage), 1);
      ptx::barrier_init(shared.keys_empty(stage), 4 * C::kConsumers);  // a warp of a consumer each
      ptx::barrier_init(shared.values_empty(stage), 4 * C::kConsumers);
    }
    ptx::barrier_fence();
  }
  __syncthreads();
  if (threadIdx.x < C::kWarpgroup) {
    ptx::give_registers<C::kCopyRegisters>();
    if (threadIdx.x == 0 && tiles > 0) {
      copy_all<C>(p, work, shared, tiles);
    }
  } else {
    ptx::take_registers<C::kComputeRegisters>();
    compute<C>(p, work, shared, tiles);
  }
}

}  // namespace distr::cuda::sm90
