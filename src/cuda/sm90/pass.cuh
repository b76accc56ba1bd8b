// SPDX-License-Identifier: Apache-2.0
// What the warpgroups of a forward block share: the addresses of their storage, one pass over the keys, and the loads
// that every key loader has, of q_hat and V.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/near.cuh"
#include "cuda/sm90/batch_entry.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/key_band.cuh"
#include "cuda/sm90/key_runs.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm90 {

template <class C>
class Shared : public SharedAddresses<typename C::Storage> {
  using Storage = typename C::Storage;
  using Barriers = typename Storage::Barriers;

 public:
  using SharedAddresses<Storage>::SharedAddresses;

  // Of a consumer; behind all of them those of far keys, where these have their own.
  [[nodiscard]] __device__ std::uint32_t queries(int index) const {
    return this->tile(offsetof(Storage, queries), sizeof(Storage::queries[0]), index);
  }
  [[nodiscard]] __device__ std::uint32_t keys(int stage) const {
    return this->tile(offsetof(Storage, keys), sizeof(Storage::keys[0]), stage);
  }
  [[nodiscard]] __device__ std::uint32_t queries_full() const {
    return this->barrier(offsetof(Barriers, queries_full));
  }
  [[nodiscard]] __device__ std::uint32_t keys_full(int stage) const {
    return this->barrier(offsetof(Barriers, keys_full), stage);
  }
  [[nodiscard]] __device__ std::uint32_t keys_empty(int stage) const {
    return this->barrier(offsetof(Barriers, keys_empty), stage);
  }
  [[nodiscard]] __device__ std::uint32_t values(int stage) const {
    return this->tile(offsetof(Storage, values), sizeof(Storage::values[0]), stage);
  }
  [[nodiscard]] __device__ std::uint32_t values_full(int stage) const {
    return this->barrier(offsetof(Barriers, values_full), stage);
  }
  [[nodiscard]] __device__ std::uint32_t values_empty(int stage) const {
    return this->barrier(offsetof(Barriers, values_empty), stage);
  }
  // Free for q_hat of far keys, where near ones come first.
  [[nodiscard]] __device__ std::uint32_t queries_empty() const {
    return this->barrier(offsetof(Barriers, queries_empty));
  }
  // Of this thread's FixedShift or Vote.
  [[nodiscard]] __device__ std::uint32_t shift() const {
    constexpr std::size_t kOfProducer = C::kFirstConsumer * kWarpgroup / 4 * sizeof(float2);
    return this->tile(offsetof(Storage, shifts) - kOfProducer, sizeof(float2), static_cast<int>(threadIdx.x) / 4);
  }
  // Of what is `offset` bytes behind the beginning of the key loader's storage or barriers.
  [[nodiscard]] __device__ std::uint32_t loader_tile(std::size_t offset, int bytes, int stage) const {
    return this->tile(offsetof(Storage, loader) + offset, bytes, stage);
  }
  [[nodiscard]] __device__ std::uint32_t loader_barrier(std::size_t offset, int stage) const {
    return this->barrier(offsetof(Barriers, loader) + offset, stage);
  }
};

template <class C>
__device__ inline void init_barriers(const Shared<C>& shared) {
  ptx::barrier_init(shared.queries_full(), 1);
  for (int stage = 0; stage < C::kStages; ++stage) {
    ptx::barrier_init(shared.keys_full(stage), C::KeyLoader::kArrivals);
    ptx::barrier_init(shared.keys_empty(stage), 4 * C::kConsumers);  // a warp of a consumer each
  }
  for (int stage = 0; stage < C::kStages; ++stage) {
    ptx::barrier_init(shared.values_full(stage), C::KeyLoader::kValueArrivals);
    ptx::barrier_init(shared.values_empty(stage), 4 * C::kConsumers);
  }
  C::KeyLoader::init_barriers(shared);
  ptx::barrier_fence();
}

// The head of k_hat that a block's queries meet.
template <class C>
[[nodiscard]] __device__ __forceinline__ int keys_head_of(const ForwardParameters& p, const WorkTile& work) {
  return C::kPhase != Phase::near && p.keys_of_query_head ? work.head : work.head_kv;
}

// Of tiles that are voted on (voted_tiles.cuh): the first ones that are near a row, and those that are special.
struct VotedCounts {
  int near = 0, special = 0;
};

// One pass over the tiles of keys, those with a mask first.
template <class C>
struct Pass {
  using BandOrFirst = std::conditional_t<C::kWindows == Windows::taken, KeyBand<C::kKeys>, FirstKeys<C::kKeys>>;
  using AllKeys = std::conditional_t<C::kVotes, VotedCounts, BandOrFirst>;
  using Keys = std::conditional_t<C::kIsRuns, KeyRuns<C::kKeys>, AllKeys>;

  const ForwardParameters& p;
  const WorkTile& work;  // the block's queries
  const Shared<C>& shared;
  int tiles;   // of keys
  int masked;  // of these, the first ones, that have keys which a row of the block does not see
  int used;    // uses of the rings before this pass: 0 in the first
  Keys keys{};

  [[nodiscard]] __device__ __forceinline__ PipelineState<C::kStages> state(int n) const {
    return PipelineState<C::kStages>(used + n);
  }
  // Of q_hat and k_hat, and the head of k_hat.
  [[nodiscard]] __device__ __forceinline__ const CUtensorMap& queries_map() const {
    return C::kPhase == Phase::far ? p.far_q : p.q;
  }
  [[nodiscard]] __device__ __forceinline__ const CUtensorMap& keys_map() const {
    return C::kPhase == Phase::far ? p.far_k : p.k;
  }
  [[nodiscard]] __device__ __forceinline__ int keys_head() const { return keys_head_of<C>(p, work); }
  [[nodiscard]] __device__ __forceinline__ bool has_entry() const { return C::kTakesLengths && p.lengths.exist(); }
  // What says which keys rows see, and the row behind the last one. It is read where it is wanted, as it has no
  // registers beside a tile's scores.
  [[nodiscard]] __device__ __forceinline__ decltype(auto) visible() const {
    if constexpr (C::kTakesLengths) {
      const DeviceProblem& of = p.problem;
      return has_entry() ? visible_to(shared.storage.entry, of)
                         : VisibleKeys{of.causal, of.seq_k, of.causal_offset, of.first_offset};
    } else {
      return (p.problem);
    }
  }
  [[nodiscard]] __device__ __forceinline__ std::int64_t row_end() const {
    if constexpr (C::kTakesLengths) {
      return has_entry() ? uniform(shared.storage.entry.row_end) : p.row_end;
    }
    return p.row_end;
  }
  // The first of the keys that lie from `first` on in tile n.
  [[nodiscard]] __device__ __forceinline__ int first_key(int n, int first = 0) const {
    if constexpr (C::kIsRuns) {
      return keys.key(n, first);
    } else {
      return keys.tile(n) * C::kKeys + first;
    }
  }
};

// A tile of a pass, and its place in the rings. Loops keep the place: computing it anew for every barrier takes 12 to
// 25 instructions a tile (docs/kernel-log.md, sm90/forward, step 80). With 16 columns and 256 keys a tile the compiler
// finds no registers for it, and would wait after every wgmma.
template <class C>
class TileInRing {
 public:
  // The first one.
  __device__ __forceinline__ explicit TileInRing(const Pass<C>& pass) : used_(pass.used), state_(pass.state(0)) {}

  [[nodiscard]] __device__ __forceinline__ PipelineState<C::kStages> state() const {
    if constexpr (kKeepsState) {
      return state_;
    } else {
      return PipelineState<C::kStages>(used_ + n);
    }
  }
  [[nodiscard]] __device__ __forceinline__ TileInRing next() const {
    TileInRing tile = *this;
    ++tile.n;
    if constexpr (kKeepsState) {
      tile.state_.advance();
    }
    return tile;
  }

  int n = 0;

 private:
  static constexpr bool kKeepsState = C::kColumns > 16 || C::kKeys < 256;

  int used_;
  PipelineState<C::kStages> state_;
};

// Tile n of K or V. Where there are runs, keys are neighbours by kNearTile alone. axis: of a batch entry, its last
// coordinate.
template <class C, class Tile>
__device__ __forceinline__ void load_keys(const Pass<C>& pass, int n, std::uint32_t tile, const CUtensorMap& map,
                                          std::uint32_t full, int head, int BatchEntry::*axis) {
  if constexpr (C::kTakesLengths) {
    if (pass.has_entry()) {
      const BatchEntry& entry = pass.shared.storage.entry;
      const int row = row_before_end(pass.first_key(n), entry.keys);
      tma_load_tile<Tile>(tile, map, full, row, head, entry.*axis, kEntryRows);
      return;
    }
  }
  if constexpr (!C::kIsRuns) {
    tma_load_tile<Tile>(tile, map, full, pass.first_key(n), head, pass.work.batch);
  } else {
#pragma unroll
    for (int first = 0; first < C::kKeys; first += common::kNearTile) {
      const int key = pass.first_key(n, first);
#pragma unroll
      for (int panel = 0; panel < Tile::kCount; ++panel) {
        ptx::tma_load(tile + static_cast<std::uint32_t>(panel * Tile::kPanelBytes + first * Tile::kRowBytes), map, full,
                      panel * Tile::kPanelColumns, key, head, pass.work.batch);
      }
    }
  }
}

// Tiles of all consumers, to the places from the first-th on.
template <class Tile, class C>
__device__ inline void load_queries(const Pass<C>& pass, const CUtensorMap& map, std::uint32_t full, int first) {
  ptx::barrier_arrive_expect_tx(full, C::kConsumers * Tile::kBytes);
  for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
    const std::uint32_t tile = pass.shared.queries(first + consumer);
    const int row = pass.work.row + 64 * consumer;
    if constexpr (C::kTakesLengths) {
      if (pass.has_entry() && pass.p.lengths.packed) {
        const BatchEntry& entry = pass.shared.storage.entry;
        tma_load_tile<Tile>(tile, map, full, row_before_end(row, entry.row_end), pass.work.head, entry.q_axis,
                            kEntryRows);
        continue;
      }
    }
    tma_load_tile<Tile>(tile, map, full, row, pass.work.head, pass.work.batch);
  }
}
template <class C>
__device__ inline void load_queries(const Pass<C>& pass) {
  load_queries<typename C::NearQueryTile>(pass, pass.queries_map(), pass.shared.queries_full(), 0);
}

// V of tile n, as soon as a stage is free.
template <class C>
__device__ __forceinline__ void load_values(const Pass<C>& pass, int n) {
  C::Stages::values([&] {
    const auto state = pass.state(n);
    const std::uint32_t full = pass.shared.values_full(state.stage);
    wait_empty(pass.shared.values_empty(state.stage), state.phase);
    ptx::barrier_arrive_expect_tx(full, C::ValueTile::kBytes);
    load_keys<C, typename C::ValueTile>(pass, n, pass.shared.values(state.stage), pass.p.v, full, pass.work.head_kv,
                                        &BatchEntry::v_axis);
  });
}

// Brings to the L2 what is read soon: the queries of the block that this SM has next, more or less, and of its head's
// keys and values those from the number of its first query on, so that a head's blocks together bring most of them.
// Where lengths are data, it would have to look for the block's batch entry first.
template <class C>
__device__ inline void prefetch_next(const ForwardParameters& p) {
  const unsigned index = blockIdx.x + p.next_tile;
  if (index >= gridDim.x || (C::kTakesLengths && p.lengths.exist())) {
    return;
  }
  const WorkTile next = p.scheduler.at(index);
#pragma unroll
  for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
    tma_prefetch_tile<typename C::NearQueryTile>(p.q, next.row + 64 * consumer, next.head, next.batch);
  }
  if (next.row < p.problem.seq_k) {
    C::KeyLoader::template prefetch<C>(p, next);
    C::Stages::values([&] { tma_prefetch_tile<typename C::ValueTile>(p.v, next.row, next.head_kv, next.batch); });
  }
}

}  // namespace distr::cuda::sm90
