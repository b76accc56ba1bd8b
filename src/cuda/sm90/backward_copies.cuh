// SPDX-License-Identifier: Apache-2.0
// What a thread block of the backward works on, where that lies in shared memory, and the copying warpgroup: tiles in,
// dQ out.
#pragma once

#include "cuda/place.cuh"
#include "cuda/sm90/backward_config.h"
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
    return outputs(C::kStages) +
           static_cast<std::uint32_t>((n + C::kGradients) % C::kGradients * C::GradientTile::kBytes);
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
  [[nodiscard]] __device__ std::uint32_t queries_full(int stage) const { return barrier(0, stage); }  // and statistics
  [[nodiscard]] __device__ std::uint32_t queries_empty(int stage) const { return barrier(1, stage); }
  [[nodiscard]] __device__ std::uint32_t outputs_full(int stage) const { return barrier(2, stage); }
  [[nodiscard]] __device__ std::uint32_t outputs_empty(int stage) const { return barrier(3, stage); }
  [[nodiscard]] __device__ std::uint32_t sums_full(int stage) const { return barrier(4, stage); }
  [[nodiscard]] __device__ std::uint32_t sums_empty(int stage) const { return barrier(5, stage); }

  [[nodiscard]] __device__ std::uint32_t gradients_full(int n) const {
    return barrier(6, 0) + static_cast<std::uint32_t>(8 * (n % C::kGradients));
  }
  [[nodiscard]] __device__ std::uint32_t exponentials_turn(int consumer) const {
    return barrier(6, 0) + static_cast<std::uint32_t>(8 * (C::kGradients + consumer));
  }

  static constexpr int kBarriers = 2 + 6 * C::kStages + C::kGradients + C::kConsumers;

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
    const std::uint32_t full = shared.queries_full(turn.stage);
    ptx::barrier_arrive_expect(full, C::QueryTile::kBytes + C::kStatsBytes);
    copy_tile<typename C::QueryTile>(shared.queries(turn.stage), p.q, full, work.row(n), work.head, work.batch);
    ptx::copy_bulk(shared.stats(turn.stage), stats + work.row(n), C::kStatsBytes, full);
  };
  const auto copy_outputs = [&](int n) {
    const Turn<C> turn(n);
    const std::uint32_t full = shared.outputs_full(turn.stage);
    ptx::barrier_wait(shared.outputs_empty(turn.stage), turn.parity ^ 1);
    ptx::barrier_arrive_expect(full, C::OutputTile::kBytes);
    copy_tile<typename C::OutputTile>(shared.outputs(turn.stage), p.d_o, full, work.row(n), work.head, work.batch);
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

}  // namespace distr::cuda::sm90
