// SPDX-License-Identifier: Apache-2.0
// dQ, dK and dV with wgmma and the copy engine, for sm_90a (method, 3), on q_hat and k_hat that were made beforehand:
// exact attention, and one grouping for the whole sequence. Q and K stand for them below.
//
//   A thread block owns kKeys keys of a query head, whose K and V stay in shared memory, and meets its tiles of kRows
//   queries, from the last to the first. Two warpgroups own 64 keys each. For a tile:
//     S^T = K Q^T, dP^T = V dO^T              [64, kRows]  started at the end of the tile before
//     P = 2^(scale S - LSE)                                while dP^T is on its way
//     dV += P^T dO                            [64, dv]     the accumulators of S^T are a left operand as they are
//     dS = P (dP - D)                                      while dV is; to shared memory, where all keys' dS meet
//     dK += dS^T Q                            [64, r]      while the other warpgroup's dS is waited for
//     dQ = dS K                               [kRows, r / 2] of all keys, a half of the columns each; to shared memory
//   The third warpgroup copies: a warp brings the tiles, and one for each buffer of dQ adds them to their sums in
//   memory.
//
//   The sum of a tile is made in the order of the keys, so its bits are the same in every run: turns[tile] counts the
//   blocks that have added to it, and a block waits until all of those before it have. The first writes instead.
//   Every turn comes:
//     - A block begins by taking a ticket, which says which keys are its own; CUDA starts blocks in whatever order. It
//       waits only for those of smaller keys of its own head, whose tickets are smaller (cuda/place.cuh), so all of
//       them have started.
//     - The block of the smallest keys waits for none, and so gets through all of its tiles; then so does the next.
//     - Who sees a tile are the first so many blocks, also where attention is causal: nobody in the order is left out.
//   As all blocks of a head go from the last tile to the first, each is behind the one before it by one hand-over and
//   from then on runs beside it. Callers who let the order change have no turns, and sums that begin as zeros.
#pragma once

#include <climits>

#include "cuda/place.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_products.cuh"
#include "cuda/sm90/backward_sums.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace distr::cuda::sm90 {

// The keys that belong to a thread block, and the queries that it meets.
template <class C>
struct KeyBlock {
  int batch, head, head_kv;
  int number;  // of the block of keys
  int key;     // the first
  int tiles;   // of queries, from the one that begins at last_row down
  int last_row;

  __device__ static KeyBlock of(unsigned block, const BackwardParameters& p) {
    const DeviceProblem& problem = p.problem;
    const int heads = static_cast<int>(problem.heads_q);
    const Place place = Place::of(block, heads, problem.batch,
                                  static_cast<unsigned>((problem.seq_k + C::kKeys - 1) / C::kKeys), p.section);
    KeyBlock result{};
    result.batch = place.batch;
    result.head = place.head;
    result.head_kv = place.head / (heads / static_cast<int>(problem.heads_kv));
    result.number = place.tile;
    result.key = place.tile * C::kKeys;
    const int end = static_cast<int>((problem.seq_q + C::kRows - 1) / C::kRows);
    result.tiles = max(end - first_query_tile(problem, result.key), 0);
    result.last_row = (end - 1) * C::kRows;
    return result;
  }
  [[nodiscard]] __device__ int row(int n) const { return last_row - n * C::kRows; }  // the n-th tile's first
};

// Where things are in shared memory.
template <class C>
struct BackwardShared {
  std::uint32_t base;
  std::uint32_t barriers;

  [[nodiscard]] __device__ std::uint32_t keys() const { return base; }
  [[nodiscard]] __device__ std::uint32_t values() const { return base + C::KeyTile::kBytes; }
  [[nodiscard]] __device__ std::uint32_t queries(int stage) const {
    return values() + static_cast<std::uint32_t>(C::ValueTile::kBytes + stage * C::QueryTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t outputs(int stage) const {  // dO
    return queries(C::kStages) + static_cast<std::uint32_t>(stage * C::OutputTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t gradients(int n) const {  // dS^T
    return outputs(C::kStages) + static_cast<std::uint32_t>(n % C::kGradients * C::GradientTile::kBytes);
  }
  [[nodiscard]] __device__ std::uint32_t sums(int n) const {  // dQ
    return outputs(C::kStages) +
           static_cast<std::uint32_t>(C::kGradients * C::GradientTile::kBytes + n % C::kStages * C::kSumsBytes);
  }
  [[nodiscard]] __device__ std::uint32_t stats(int stage) const {
    return sums(0) + static_cast<std::uint32_t>(C::kStages * C::kSumsBytes + stage * C::kStatsBytes);
  }

  [[nodiscard]] __device__ std::uint32_t keys_full() const { return barriers; }
  [[nodiscard]] __device__ std::uint32_t values_full() const { return barriers + 8; }
  [[nodiscard]] __device__ std::uint32_t queries_full(int stage) const { return barrier(0, stage); }
  [[nodiscard]] __device__ std::uint32_t queries_empty(int stage) const { return barrier(1, stage); }
  [[nodiscard]] __device__ std::uint32_t outputs_full(int stage) const { return barrier(2, stage); }  // and statistics
  [[nodiscard]] __device__ std::uint32_t outputs_empty(int stage) const { return barrier(3, stage); }
  [[nodiscard]] __device__ std::uint32_t sums_full(int stage) const { return barrier(4, stage); }
  [[nodiscard]] __device__ std::uint32_t sums_empty(int stage) const { return barrier(5, stage); }

  static constexpr int kBarriers = 2 + 6 * C::kStages;

 private:
  [[nodiscard]] __device__ std::uint32_t barrier(int kind, int stage) const {
    return barriers + static_cast<std::uint32_t>(8 * (2 + kind * C::kStages + stage));
  }
};

// By one thread: K and V, and then tile after tile of Q and dO.
template <class C>
__device__ inline void copy_all(const BackwardParameters& p, const KeyBlock<C>& work, const BackwardShared<C>& shared) {
  const int key_head = p.keys_of_query_head ? work.head : work.head_kv;
  const float2* const stats = p.stats + (std::int64_t{work.batch} * p.problem.heads_q + work.head) * p.stats_rows;
  const auto copy_queries = [&](int n) {
    const Turn<C> turn(n);
    ptx::barrier_wait(shared.queries_empty(turn.stage), turn.parity ^ 1);
    ptx::barrier_arrive_expect(shared.queries_full(turn.stage), C::QueryTile::kBytes);
    copy_tile<typename C::QueryTile>(shared.queries(turn.stage), p.q, shared.queries_full(turn.stage), work.row(n),
                                     work.head, work.batch);
  };
  const auto copy_outputs = [&](int n) {
    const Turn<C> turn(n);
    const std::uint32_t full = shared.outputs_full(turn.stage);
    ptx::barrier_wait(shared.outputs_empty(turn.stage), turn.parity ^ 1);
    ptx::barrier_arrive_expect(full, C::OutputTile::kBytes + C::kStatsBytes);
    copy_tile<typename C::OutputTile>(shared.outputs(turn.stage), p.d_o, full, work.row(n), work.head, work.batch);
    ptx::copy_bulk(shared.stats(turn.stage), stats + work.row(n), C::kStatsBytes, full);
  };
  ptx::barrier_arrive_expect(shared.keys_full(), C::KeyTile::kBytes);
  copy_tile<typename C::KeyTile>(shared.keys(), p.k, shared.keys_full(), work.key, key_head, work.batch);
  copy_queries(0);
  ptx::barrier_arrive_expect(shared.values_full(), C::ValueTile::kBytes);
  copy_tile<typename C::ValueTile>(shared.values(), p.v, shared.values_full(), work.key, work.head_kv, work.batch);
  copy_outputs(0);
  for (int n = 1; n < work.tiles; ++n) {
    copy_queries(n);
    copy_outputs(n);
  }
}

// By one thread for each of the kStages buffers: adds dQ of its tiles to their sums in memory, when it is their turn.
template <class C>
__device__ inline void add_all(const BackwardParameters& p, const KeyBlock<C>& work, const BackwardShared<C>& shared,
                               int buffer) {
  const auto number = static_cast<unsigned>(work.number);
  const std::int64_t tiles = (p.problem.seq_q + C::kRows - 1) / C::kRows;
  const std::int64_t of_head = (std::int64_t{work.batch} * p.problem.heads_q + work.head) * tiles;
  const bool ordered = p.turns != nullptr;
  for (int n = buffer; n < work.tiles; n += C::kStages) {
    const Turn<C> turn(n);
    const std::int64_t tile = of_head + work.row(n) / C::kRows;
    float* const sums = p.sums + tile * (C::kRows * C::kColumns);
    if (ordered) {
      wait_for_turn(p.turns + tile, number);
    }
    ptx::barrier_wait(shared.sums_full(turn.stage), turn.parity);
    ptx::fence_proxy_async_global();  // what others added before our turn comes before what the copy engine adds now
    if (ordered && number == 0) {
      ptx::store_bulk(sums, shared.sums(n), C::kSumsBytes);
    } else {
      ptx::add_bulk(sums, shared.sums(n), C::kSumsBytes);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::barrier_arrive(shared.sums_empty(turn.stage));
    ptx::bulk_wait<0>();
    if (ordered) {
      ptx::store_release(p.turns + tile, number + 1);
    }
  }
}

// Whether there is another tile behind the one at hand.
enum class Next : std::uint8_t { tile, none };

// A consumer's 64 keys and all tiles of queries, of which there is at least one.
template <class C>
__device__ __forceinline__ void compute(const BackwardParameters& p, const KeyBlock<C>& work,
                                        const BackwardShared<C>& shared, int consumer, float (&d_k)[C::kColumns / 2],
                                        float (&d_v)[C::kValues / 2]) {
  using T = typename C::Element;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) % C::kWarpgroup / 32;
  const DeviceProblem& problem = p.problem;
  const int offset = static_cast<int>(problem.causal_offset);
  const int first_key = work.key + 64 * consumer;
  const bool ragged = first_key + 64 > static_cast<int>(problem.seq_k);
  const auto release = [&](std::uint32_t barrier) {
    if (lane == 0) {
      ptx::barrier_arrive(barrier);
    }
  };

  ptx::barrier_wait(shared.keys_full(), 0);
  const typename C::template LeftOperand<typename C::KeyTile> keys(shared.keys(), 64 * consumer);
  ptx::barrier_wait(shared.values_full(), 0);
  const typename C::template LeftOperand<typename C::ValueTile> values(shared.values(), 64 * consumer);

  float s[32];   // S^T, then P^T
  float dp[32];  // dP^T, then dS^T
  Weights p_operand;
  Weights ds_operand;
  // 0, which the compiler does not know: else it would keep every descriptor of K and V in registers all along.
  const auto nothing = [](int n) { return static_cast<unsigned>(n) >> 20; };
  const auto start = [&](int n) {
    const Turn<C> turn(n);
    ptx::barrier_wait(shared.queries_full(turn.stage), turn.parity);
    start_transposed_scores<T, typename C::QueryTile>(s, keys, shared.queries(turn.stage), nothing(n));
    ptx::barrier_wait(shared.outputs_full(turn.stage), turn.parity);
    start_transposed_scores<T, typename C::OutputTile>(dp, values, shared.outputs(turn.stage), nothing(n));
  };
  const auto visit_tile = [&]<Next kNext>(int n) {
    const Turn<C> turn(n);
    const int row = work.row(n);
    const bool edge = ragged || (problem.causal && first_key + 63 > row + offset);
    const std::uint32_t stats = shared.stats(turn.stage) + static_cast<std::uint32_t>(lane % 4) * 64;

    ptx::wgmma_wait<1>();  // S^T is there
    if (edge) {
      hide<C>(s, problem, first_key + warp * 16, row, -INFINITY);
    }
    exponentials(s, stats, problem.scale_log2);
    pack_weights<T>(s, p_operand);
    start_key_sums<T, typename C::OutputTile>(d_v, p_operand, shared.outputs(turn.stage));

    ptx::wgmma_wait<1>();  // dP^T is there
    if (edge) {
      hide<C>(dp, problem, first_key + warp * 16, row, 0.0F);
    }
    differentiate(s, dp, stats);
    pack_weights<T>(dp, ds_operand);
    keep_gradients<C>(ds_operand, shared.gradients(n), consumer);
    ptx::fence_proxy_async();
    // dS of all keys is there. Both consumers are then done with dS of the tile before, whose place the next one takes.
    start_key_sums<T, typename C::QueryTile>(d_k, ds_operand, shared.queries(turn.stage));
    ptx::named_barrier_sync(1, C::kConsumers * C::kWarpgroup);

    float d_q[C::kColumns / 4];
    start_query_sums<C>(d_q, shared.gradients(n), shared.keys() + nothing(n), consumer);
    ptx::wgmma_wait<0>();
    release(shared.queries_empty(turn.stage));
    release(shared.outputs_empty(turn.stage));
    if constexpr (kNext == Next::tile && C::kStartsEarly) {
      start(n + 1);
    }
    ptx::barrier_wait(shared.sums_empty(turn.stage), turn.parity ^ 1);
    keep_sums<C>(d_q, shared.sums(n), consumer);
    ptx::fence_proxy_async();
    __syncwarp();
    release(shared.sums_full(turn.stage));
    if constexpr (kNext == Next::tile && !C::kStartsEarly) {
      start(n + 1);
    }
  };

  // Or else the compiler takes the zeros for what it must wait for, and ends every single wgmma before the next.
  ptx::settle(d_k);
  ptx::settle(d_v);
  start(0);
  const int last = work.tiles - 1;
#pragma unroll 1
  for (int n = 0; n < last; ++n) {
    visit_tile.template operator()<Next::tile>(n);
  }
  visit_tile.template operator()<Next::none>(last);
  ptx::settle(d_k);
  ptx::settle(d_v);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) backward(const __grid_constant__ BackwardParameters p) {
  extern __shared__ std::uint8_t memory[];
  __shared__ std::uint64_t barriers[BackwardShared<C>::kBarriers];
  __shared__ unsigned s_block;  // the number that KeyBlock::of takes
  const std::uint32_t base = (ptx::shared_address(memory) + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  const BackwardShared<C> shared{__shfl_sync(~0U, base, 0), __shfl_sync(~0U, ptx::shared_address(barriers), 0)};

  if (threadIdx.x == 0) {
    s_block = p.ticket != nullptr ? atomicAdd(p.ticket, 1U) : blockIdx.x;
    constexpr unsigned kComputingWarps = 4 * C::kConsumers;
    ptx::barrier_init(shared.keys_full(), 1);
    ptx::barrier_init(shared.values_full(), 1);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::barrier_init(shared.queries_full(stage), 1);
      ptx::barrier_init(shared.queries_empty(stage), kComputingWarps);
      ptx::barrier_init(shared.outputs_full(stage), 1);
      ptx::barrier_init(shared.outputs_empty(stage), kComputingWarps);
      ptx::barrier_init(shared.sums_full(stage), kComputingWarps);
      ptx::barrier_init(shared.sums_empty(stage), 1);
    }
    ptx::barrier_fence();
  }
  __syncthreads();

  // The same for all threads of a warp, which the compiler cannot see.
  const auto work = KeyBlock<C>::of(__shfl_sync(~0U, s_block, 0), p);
  const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x < C::kWarpgroup) {
    ptx::give_registers<C::kCopyRegisters>();
    if (threadIdx.x % 32 == 0 && work.tiles > 0) {
      if (warp == 0) {
        copy_all<C>(p, work, shared);
      } else if (warp <= C::kStages) {
        add_all<C>(p, work, shared, warp - 1);
      }
    }
  } else {
    ptx::take_registers<C::kComputeRegisters>();
    const int consumer = warp / 4 - 1;
    float d_k[C::kColumns / 2];
    float d_v[C::kValues / 2];
#pragma unroll
    for (float& x : d_k) {
      x = __uint_as_float(ptx::opaque(0));  // else the compiler writes the zeros where wgmma is under way, and waits
    }
#pragma unroll
    for (float& x : d_v) {
      x = __uint_as_float(ptx::opaque(0));
    }
    if (work.tiles > 0) {
      compute<C>(p, work, shared, consumer, d_k, d_v);
    }
    const int row = work.key + (warp - 4) * 16;  // this warp's first key
    const KeyHead head{work.batch, work.head, work.head_kv};
    store_keys<typename C::Element>(p, head, row, d_k, p.d_k_parts, p.d_k, p.d_k_strides, p.problem.head_dim, p.scale);
    store_keys<typename C::Element>(p, head, row, d_v, p.d_v_parts, p.d_v, p.d_v_strides, p.problem.head_dim_v, 1.0F);
  }
}

}  // namespace distr::cuda::sm90
