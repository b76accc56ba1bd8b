// SPDX-License-Identifier: Apache-2.0
// What a thread block of the backward works on, where that lies in shared memory, and the producer warpgroup: tiles in
// by TMA, dQ out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/backward_scheduler.cuh"
#include "cuda/near.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/batch_entry.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace distr::cuda::sm90 {

template <class C>
[[nodiscard]] __device__ inline bool is_packed(const BackwardParameters& p) {
  return C::kTakesLengths && p.lengths.packed;
}

// What says which of a block's rows see a key: the problem, or what its packed sequence has of its own.
template <class C>
[[nodiscard]] __device__ __forceinline__ decltype(auto) visible_rows(const BackwardParameters& p,
                                                                     const BackwardStorage<C>& storage) {
  const DeviceProblem& of = p.problem;
  if constexpr (C::kTakesLengths) {
    const KeySequence& own = storage.sequence;
    return is_packed<C>(p) ? VisibleRows{{of.causal, own.keys, own.causal_offset,
                                          has_left_end(of) ? own.first_offset : of.first_offset},
                                         own.rows}
                           : VisibleRows{{of.causal, of.seq_k, of.causal_offset, of.first_offset}, of.seq_q};
  } else {
    return (of);
  }
}

// Finds the block's packed sequence, by its ticket. All threads call it; false: it has no keys.
template <class C>
[[nodiscard]] __device__ inline bool enter_sequence(const BackwardParameters& p, KeySequence& to) {
  const DeviceProblem& problem = p.problem;
  const DeviceLengths& lengths = p.lengths;
  if (threadIdx.x < 32) {
    unsigned block = blockIdx.x;
    if (p.ticket != nullptr) {
      block = __shfl_sync(~0U, threadIdx.x == 0 ? atomicAdd(p.ticket, 1U) : 0, 0);
    }
    const int heads = static_cast<int>(problem.heads_q);
    const TileCoord coord = TileCoord::of(block, heads, 1, gridDim.x / static_cast<unsigned>(heads), p.interleaved);
    const PackedTile tile =
        find_packed_tile(lengths.of.starts_k, static_cast<int>(problem.batch), coord.tile, C::kKeys);
    if (threadIdx.x == 0) {
      const DeviceSequence sequence(problem, lengths, tile.sequence);
      const VisibleRows visible = visible_rows(problem, lengths, sequence);
      const bool has_keys = tile.number >= 0 && tile.number < (sequence.keys + C::kKeys - 1) / C::kKeys;
      to.rows = sequence.rows;
      to.keys = sequence.keys;
      to.causal_offset = static_cast<int>(visible.causal_offset);
      to.first_offset = has_left_end(problem) ? static_cast<int>(visible.first_offset) : 0;
      to.head = coord.head;
      to.number = has_keys ? tile.number : -1;
      to.first_key = sequence.first_key;
      to.row_axis = sequence.first_row + sequence.rows;
      to.key_axis = sequence.first_key + sequence.keys;
      to.stats_row = static_cast<int>(padded_start(tile.sequence, sequence.first_row));
      to.sums_key = static_cast<int>(padded_start(tile.sequence, sequence.first_key));
    }
  }
  __syncthreads();
  return to.number >= 0;
}

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
  int piece;                 // its number among those of all split blocks (SplitKeys); or -1: the block is whole

  __device__ static KeyWork of(const BackwardStorage<C>& storage, const BackwardParameters& p) {
    const DeviceProblem& problem = p.problem;
    const auto visible = visible_rows<C>(p, storage);
    const int heads = static_cast<int>(problem.heads_q);
    const auto blocks = static_cast<int>((problem.seq_k + C::kKeys - 1) / C::kKeys);
    KeyWork result{};
    TileCoord coord{};
    int own = 0;  // the piece's number among the block's
    result.piece = -1;
    if (is_packed<C>(p)) {
      if constexpr (C::kTakesLengths) {
        coord = {0, uniform(storage.sequence.head), uniform(storage.sequence.number)};
      }
    } else {
      const auto pieces = static_cast<int>(p.split.pieces);
      unsigned block = uniform(storage.block);
      if (p.tiles != QueryTiles::near && block >= p.split.first) {
        result.piece = static_cast<int>(block - p.split.first);
        own = result.piece % pieces;
        block = p.split.first + static_cast<unsigned>(result.piece / pieces);
      }
      const int sinks = p.tiles == QueryTiles::near ? min(problem.near.sinks, blocks) : 0;
      coord = TileCoord::of(block, heads, problem.batch, static_cast<unsigned>(blocks + sinks * (pieces - 1)),
                            p.interleaved);
      if (sinks > 0) {  // they are near to all tiles, and come last, else all others would wait for them
        const int of_sinks = coord.tile - (blocks - sinks);
        coord.tile += sinks;
        if (of_sinks >= 0) {
          coord.tile = of_sinks / pieces;
          own = of_sinks % pieces;
          result.piece = pieces == 1 ? -1 : (coord.batch * heads + coord.head) * sinks * pieces + of_sinks;
        }
      }
    }
    result.batch = coord.batch;
    result.head = coord.head;
    result.head_kv = coord.head / (heads / static_cast<int>(problem.heads_kv));
    result.number = coord.tile;
    result.key = result.number * C::kKeys;
    int end = static_cast<int>((visible.seq_q + C::kRows - 1) / C::kRows);
    int first = min(first_query_tile(visible, result.key), end);
    if (has_left_end(visible)) {
      end = max(end_query_tile(visible, std::int64_t{result.key} + C::kKeys), first);
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
    if (result.piece >= 0) {
      const auto end_of = [&](int count) {
        return static_cast<int>(static_cast<unsigned>(result.tiles * count) / p.split.pieces);
      };
      const int before = end_of(own);
      result.last_row -= before * C::kRows;
      result.tiles = end_of(own + 1) - before;
    }
    return result;
  }
  // The n-th tile's first.
  [[nodiscard]] __device__ int row(int n) const { return last_row - n * C::kRows - (n < tiles_above ? 0 : gap); }
  [[nodiscard]] __device__ bool is_near(int n) const { return row(n) >= near_first && row(n) < near_end; }

  // How many blocks of the launch add to the n-th tile before this one.
  [[nodiscard]] __device__ unsigned turn(const BackwardParameters& p, const BackwardStorage<C>& storage, int n) const {
    if (p.tiles == QueryTiles::all) {
      const std::int64_t first =
          has_left_end(p.problem) ? first_visible_key(visible_rows<C>(p, storage), row(n)) / C::kKeys : 0;
      return static_cast<unsigned>(number - static_cast<int>(first));
    }
    const NearTiles of_row = near_tiles(p.problem, row(n), keys_of_tile(p.problem, row(n)));
    return static_cast<unsigned>(p.tiles == QueryTiles::near ? of_row.near_before(number) : of_row.far_before(number));
  }
};

template <class C>
[[nodiscard]] __device__ inline KeyPlace place_of(const BackwardParameters& p, const KeyWork<C>& work,
                                                  const BackwardStorage<C>& storage) {
  if constexpr (C::kTakesLengths) {
    if (is_packed<C>(p)) {
      const KeySequence& own = storage.sequence;
      return {0, work.head_kv, own.first_key, own.keys, work.head * p.key_rows + own.sums_key, false};
    }
  }
  const bool is_piece = work.piece >= 0;
  const std::int64_t head = work.batch * p.problem.heads_q + work.head;
  const std::int64_t part = is_piece ? std::int64_t{work.piece} * C::kKeys - work.key : head * p.key_rows;
  return {work.batch, work.head_kv, 0, static_cast<int>(p.problem.seq_k), part, is_piece};
}

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
  [[nodiscard]] __device__ std::uint32_t d_s(int stage) const {  // dS^T
    return this->tile(offsetof(Storage, d_s), C::DsTile::kBytes, stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_q(int stage) const {
    return this->tile(offsetof(Storage, d_q), sizeof(typename Storage::DqBuffer), stage);
  }
  // The queries' statistics, for a consumer.
  [[nodiscard]] __device__ std::uint32_t stats(int stage, int consumer) const {
    return C::kStatsInDs ? d_s(stage) + static_cast<std::uint32_t>(consumer * C::DsTile::kBytes / C::kConsumers)
                         : this->tile(offsetof(Storage, stats), sizeof(StatsColumns), stage);
  }
  [[nodiscard]] __device__ std::uint32_t ones() const { return this->tile(offsetof(Storage, ones), 0, 0); }

  [[nodiscard]] __device__ std::uint32_t keys_full() const { return this->barrier(offsetof(Barriers, keys_full)); }
  [[nodiscard]] __device__ std::uint32_t values_full() const { return this->barrier(offsetof(Barriers, values_full)); }
  [[nodiscard]] __device__ std::uint32_t queries_full(int stage) const {
    return this->barrier(offsetof(Barriers, queries_full), stage);
  }
  [[nodiscard]] __device__ std::uint32_t queries_empty(int stage) const {
    return this->barrier(offsetof(Barriers, queries_empty), stage);
  }
  [[nodiscard]] __device__ std::uint32_t d_o_full(int stage) const {
    return C::kDqApart ? queries_full(stage) : this->barrier(offsetof(Barriers, d_o_full), stage);
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
  [[nodiscard]] __device__ std::uint32_t d_s_full(int stage) const {
    return this->barrier(offsetof(Barriers, d_s_full), stage);
  }
  [[nodiscard]] __device__ std::uint32_t pingpong(int consumer) const {
    return this->barrier(offsetof(Barriers, pingpong), consumer);
  }
};

// Called by one thread: loads K and V, and then Q and dO tile by tile.
template <class C>
__device__ inline void load_all(const BackwardParameters& p, const KeyWork<C>& work, const BackwardShared<C>& shared) {
  const int key_head = p.keys_of_query_head ? work.head : work.head_kv;
  std::int64_t first_stats = (std::int64_t{work.batch} * p.problem.heads_q + work.head) * p.stats_rows;
  int before_rows = 0;  // of the map of Q and dO, which ends where a packed sequence ends (batch_entry.cuh)
  int key = work.key;
  int row_axis = work.batch;
  int key_axis = work.batch;
  if constexpr (C::kTakesLengths) {
    if (is_packed<C>(p)) {
      const KeySequence& own = shared.storage.sequence;
      first_stats += own.stats_row;
      before_rows = row_before_end(0, own.rows);
      key = row_before_end(key, own.keys);
      row_axis = own.row_axis;
      key_axis = own.key_axis;
    }
  }
  const auto load_tile = [&](auto tile, std::uint32_t to, const CUtensorMap& map, std::uint32_t full, int row, int head,
                             int axis) {
    using P = typename decltype(tile)::type;
    if constexpr (C::kTakesLengths) {
      if (is_packed<C>(p)) {
        tma_load_tile<P>(to, map, full, row, head, axis, kEntryRows);
        return;
      }
    }
    tma_load_tile<P>(to, map, full, row, head, axis);
  };
  const auto load_queries = [&](int n) {
    const bool is_near = work.is_near(n);
    const PipelineState<C::kStages> state(n);
    wait_empty(shared.queries_empty(state.stage), state.phase);
    const std::uint32_t full = shared.queries_full(state.stage);
    ptx::barrier_arrive_expect_tx(full, C::QueryTile::kBytes +
                                            C::kStatsCopies * static_cast<int>(sizeof(StatsColumns)) +
                                            C::kDqApart * C::DoTile::kBytes);
    load_tile(std::type_identity<typename C::QueryTile>{}, shared.queries(state.stage), is_near ? p.near.q : p.q, full,
              before_rows + work.row(n), work.head, row_axis);
    for (int consumer = 0; consumer < C::kStatsCopies; ++consumer) {
      ptx::bulk_load(shared.stats(state.stage, consumer),
                     (is_near ? p.near.stats : p.stats) + (first_stats + work.row(n)) / kStatsTile,
                     sizeof(StatsColumns), full);
    }
  };
  const auto load_d_o = [&](int n) {
    const PipelineState<C::kStages> state(n);
    const std::uint32_t full = shared.d_o_full(state.stage);
    if constexpr (!C::kDqApart) {
      wait_empty(shared.d_o_empty(state.stage), state.phase);
      ptx::barrier_arrive_expect_tx(full, C::DoTile::kBytes);
    }
    load_tile(std::type_identity<typename C::DoTile>{}, shared.d_o(state.stage), p.d_o, full, before_rows + work.row(n),
              work.head, row_axis);
  };
  ptx::barrier_arrive_expect_tx(shared.keys_full(), C::KeyTile::kBytes);
  load_tile(std::type_identity<typename C::KeyTile>{}, shared.keys(), p.k, shared.keys_full(), key, key_head, key_axis);
  load_queries(0);
  ptx::barrier_arrive_expect_tx(shared.values_full(), C::ValueTile::kBytes);
  load_tile(std::type_identity<typename C::ValueTile>{}, shared.values(), p.v, shared.values_full(), key, work.head_kv,
            key_axis);
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
  std::int64_t of_head = (std::int64_t{work.batch} * p.problem.heads_q + work.head) * tiles;
  if constexpr (C::kTakesLengths) {
    if (is_packed<C>(p)) {
      of_head = (work.head * p.stats_rows + shared.storage.sequence.stats_row) / C::kRows;
    }
  }
  const bool ordered = p.dq_semaphore != nullptr;
  for (int n = buffer; n < work.tiles; n += C::kStages) {
    const PipelineState<C::kStages> state(n);
    const std::int64_t tile = of_head + work.row(n) / C::kRows;
    const bool is_near = work.is_near(n);
    float* const dq_accum = is_near ? p.near.dq_accum + tile * (C::kRows * (C::kColumns + 1))
                                    : p.dq_accum + tile * (C::kRows * C::kColumns);
    const unsigned turn = work.turn(p, shared.storage, n);
    if (ordered) {
      wait_for_semaphore(p.dq_semaphore + tile, turn);
    }
    ptx::barrier_wait(shared.d_q_full(state.stage), state.phase);
    ptx::fence_proxy_async_global();  // what others added before our turn comes before what TMA adds now
    if (ordered && turn == 0 && !p.problem.near.has) {
      ptx::bulk_store(dq_accum, shared.d_q(state.stage), C::kDqBytes);
    } else {
      ptx::bulk_add(dq_accum, shared.d_q(state.stage), C::kDqBytes + (is_near && p.near.sums_ds ? C::kDsSumsBytes : 0));
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
