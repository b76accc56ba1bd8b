// SPDX-License-Identifier: Apache-2.0
// What a thread block of the backward works on, where that lies in shared memory, and the producer warpgroup: tiles in
// by TMA, dQ out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/backward_scheduler.cuh"
#include "cuda/near.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace distr::cuda::sm90 {

// The keys that belong to a thread block, and the queries that it meets.
template <class C>
struct KeyWork {
  int batch, head, head_kv;
  int number;  // of the block of keys
  int key;     // the first
  int tiles;   // of queries, from the one that begins at last_row down
  int last_row;
  int tiles_above, gap;      // from the tile `tiles_above` on they begin `gap` rows lower: those between are not met
  int near_first, near_end;  // rows that the keys are near to

  __device__ static KeyWork of(unsigned cta, const BackwardParameters& p) {
    const DeviceProblem& problem = p.problem;
    const int heads = static_cast<int>(problem.heads_q);
    const auto blocks = static_cast<int>((problem.seq_k + C::kKeys - 1) / C::kKeys);
    const auto coord = TileCoord::of(cta, heads, problem.batch, static_cast<unsigned>(blocks), p.interleaved);
    KeyWork result{};
    result.batch = coord.batch;
    result.head = coord.head;
    result.head_kv = coord.head / (heads / static_cast<int>(problem.heads_kv));
    // Sinks are near to all tiles. They come last in a launch of near tiles, else all others would wait for them.
    result.number = coord.tile + (p.tiles == QueryTiles::near ? min(problem.near.sinks, blocks) : 0);
    result.number -= result.number < blocks ? 0 : blocks;
    result.key = result.number * C::kKeys;
    int end = static_cast<int>((problem.seq_q + C::kRows - 1) / C::kRows);
    int first = min(first_query_tile(problem, result.key), end);
    if (has_left_end(problem)) {
      end = max(end_query_tile(problem, std::int64_t{result.key} + C::kKeys), first);
    }
    if (problem.near.has) {
      static_assert(C::kKeys == common::kNearTile && common::kNearTile % C::kRows == 0);
      const NearRows rows = near_rows(problem, result.number);
      const int near_first = min(max(static_cast<int>(rows.first / C::kRows), first), end);
      const int near_end = max(min(static_cast<int>((rows.last + C::kRows - 1) / C::kRows), end), near_first);
      result.near_first = near_first * C::kRows;
      result.near_end = near_end * C::kRows;
      if (p.tiles == QueryTiles::near) {
        first = near_first;
        end = near_end;
      } else if (p.tiles == QueryTiles::far) {
        result.gap = result.near_end - result.near_first;
      }
    }
    result.tiles = end - first - result.gap / C::kRows;
    result.last_row = (end - 1) * C::kRows;
    result.tiles_above = end - result.near_end / C::kRows;
    return result;
  }
  // The n-th tile's first.
  [[nodiscard]] __device__ int row(int n) const { return last_row - n * C::kRows - (n < tiles_above ? 0 : gap); }
  [[nodiscard]] __device__ bool is_near(int n) const { return row(n) >= near_first && row(n) < near_end; }

  // How many blocks of the launch add to the n-th tile before this one.
  [[nodiscard]] __device__ unsigned turn(const BackwardParameters& p, int n) const {
    if (p.tiles == QueryTiles::all) {
      const std::int64_t first = has_left_end(p.problem) ? first_visible_key(p.problem, row(n)) / C::kKeys : 0;
      return static_cast<unsigned>(number - static_cast<int>(first));
    }
    const NearTiles of_row = near_tiles(p.problem, row(n), keys_of_tile(p.problem, row(n)));
    return static_cast<unsigned>(p.tiles == QueryTiles::near ? of_row.near_before(number) : of_row.far_before(number));
  }
};

template <class C>
class BackwardShared : public SharedAddresses<BackwardStorage<C>> {
  using Storage = BackwardStorage<C>;
  using Barriers = typename Storage::Barriers;

 public:
  using SharedAddresses<Storage>::SharedAddresses;

  [[nodiscard]] __device__ std::uint32_t keys() const {
    return this->tile(offsetof(Storage, keys), C::KeyTile::kBytes, 0);
  }
  [[nodiscard]] __device__ std::uint32_t values() const {
    return this->tile(offsetof(Storage, values), C::ValueTile::kBytes, 0);
  }
  [[nodiscard]] __device__ std::uint32_t queries(int stage) const {
    return this->tile(offsetof(Storage, queries), C::QueryTile::kBytes, stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_o(int stage) const {
    return this->tile(offsetof(Storage, d_o), C::DoTile::kBytes, stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_s(int n) const {  // dS^T
    return this->tile(offsetof(Storage, d_s), C::DsTile::kBytes, (n + C::kDsBuffers) % C::kDsBuffers);
  }
  [[nodiscard]] __device__ std::uint32_t d_q(int n) const {
    return this->tile(offsetof(Storage, d_q), C::kDqBytes, n % C::kStages);
  }
  [[nodiscard]] __device__ std::uint32_t stats(int stage) const {
    return this->tile(offsetof(Storage, stats), C::kStatsBytes, stage);
  }

  [[nodiscard]] __device__ std::uint32_t keys_full() const { return this->barrier(offsetof(Barriers, keys_full)); }
  [[nodiscard]] __device__ std::uint32_t values_full() const { return this->barrier(offsetof(Barriers, values_full)); }
  [[nodiscard]] __device__ std::uint32_t queries_full(int stage) const {
    return this->barrier(offsetof(Barriers, queries_full), stage);
  }
  [[nodiscard]] __device__ std::uint32_t queries_empty(int stage) const {
    return this->barrier(offsetof(Barriers, queries_empty), stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_o_full(int stage) const {
    return this->barrier(offsetof(Barriers, d_o_full), stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_o_empty(int stage) const {
    return this->barrier(offsetof(Barriers, d_o_empty), stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_q_full(int stage) const {
    return this->barrier(offsetof(Barriers, d_q_full), stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_q_empty(int stage) const {
    return this->barrier(offsetof(Barriers, d_q_empty), stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_s_full(int n) const {
    return this->barrier(offsetof(Barriers, d_s_full), n % C::kDsBuffers);
  }
  [[nodiscard]] __device__ std::uint32_t pingpong(int consumer) const {
    return this->barrier(offsetof(Barriers, pingpong), consumer);
  }
};

// Called by one thread: loads K and V, and then Q and dO tile by tile.
template <class C>
__device__ inline void load_all(const BackwardParameters& p, const KeyWork<C>& work, const BackwardShared<C>& shared) {
  const int key_head = p.keys_of_query_head ? work.head : work.head_kv;
  const std::int64_t first_stats = (std::int64_t{work.batch} * p.problem.heads_q + work.head) * p.stats_rows;
  const auto load_queries = [&](int n) {
    const bool is_near = work.is_near(n);
    const PipelineState<C::kStages> state(n);
    wait_empty(shared.queries_empty(state.stage), state.phase);
    const std::uint32_t full = shared.queries_full(state.stage);
    ptx::barrier_arrive_expect_tx(full, C::QueryTile::kBytes + C::kStatsBytes);
    tma_load_tile<typename C::QueryTile>(shared.queries(state.stage), is_near ? p.near.q : p.q, full, work.row(n),
                                         work.head, work.batch);
    ptx::bulk_load(shared.stats(state.stage), (is_near ? p.near.stats : p.stats) + first_stats + work.row(n),
                   C::kStatsBytes, full);
  };
  const auto load_d_o = [&](int n) {
    const PipelineState<C::kStages> state(n);
    const std::uint32_t full = shared.d_o_full(state.stage);
    wait_empty(shared.d_o_empty(state.stage), state.phase);
    ptx::barrier_arrive_expect_tx(full, C::DoTile::kBytes);
    tma_load_tile<typename C::DoTile>(shared.d_o(state.stage), p.d_o, full, work.row(n), work.head, work.batch);
  };
  ptx::barrier_arrive_expect_tx(shared.keys_full(), C::KeyTile::kBytes);
  tma_load_tile<typename C::KeyTile>(shared.keys(), p.k, shared.keys_full(), work.key, key_head, work.batch);
  load_queries(0);
  ptx::barrier_arrive_expect_tx(shared.values_full(), C::ValueTile::kBytes);
  tma_load_tile<typename C::ValueTile>(shared.values(), p.v, shared.values_full(), work.key, work.head_kv, work.batch);
  load_d_o(0);
  for (int n = 1; n < work.tiles; ++n) {
    load_queries(n);
    load_d_o(n);
  }
}

// Called by one thread for each of the kStages buffers of dQ: adds its tiles to dq_accum, in the order of the keys
// where there are semaphores.
template <class C>
__device__ inline void reduce_all(const BackwardParameters& p, const KeyWork<C>& work, const BackwardShared<C>& shared,
                                  int buffer) {
  const std::int64_t tiles = (p.problem.seq_q + C::kRows - 1) / C::kRows;
  const std::int64_t of_head = (std::int64_t{work.batch} * p.problem.heads_q + work.head) * tiles;
  const bool ordered = p.dq_semaphore != nullptr;
  for (int n = buffer; n < work.tiles; n += C::kStages) {
    const PipelineState<C::kStages> state(n);
    const std::int64_t tile = of_head + work.row(n) / C::kRows;
    float* const dq_accum = (work.is_near(n) ? p.near.dq_accum : p.dq_accum) + tile * (C::kRows * C::kColumns);
    const unsigned turn = work.turn(p, n);
    if (ordered) {
      wait_for_semaphore(p.dq_semaphore + tile, turn);
    }
    ptx::barrier_wait(shared.d_q_full(state.stage), state.phase);
    ptx::fence_proxy_async_global();  // what others added before our turn comes before what TMA adds now
    if (ordered && turn == 0 && !p.problem.near.has) {
      ptx::bulk_store(dq_accum, shared.d_q(n), C::kDqBytes);
    } else {
      ptx::bulk_add(dq_accum, shared.d_q(n), C::kDqBytes);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::barrier_arrive(shared.d_q_empty(state.stage));
    ptx::bulk_wait<0>();
    if (ordered) {
      ptx::store_release(p.dq_semaphore + tile, turn + 1);
    }
  }
}

}  // namespace distr::cuda::sm90
