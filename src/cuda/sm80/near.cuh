// SPDX-License-Identifier: Apache-2.0
// The forward with near keys and skipped halves of tiles (method, 8), by mma.sync, for sm_80 and later.
//
//   A thread block takes the rows 64 i .. 64 i + 63 of a head, which skip together, and each of its 4 warps 16 of them.
//   Keys are met 64 at a time, half a tile: the near ones first, then the far ones.
//     S = Q K^T    from all columns where keys are near, else from those that are kept, which come first in Q and K^T
//     vote         a far half in which no row has a score above L_i + log2 p is left at that: no V, no exponentials
//     P, O += P V  an online row max; with `finish` behind scores from all columns
//   What the means of dropped columns add to a row's far scores is a constant: it is taken from the row max before the
//   first far half, and given back at the end. Shared memory: NearStorage (Q and two stages of K^T, with columns in
//   order, and two of V; Q as it is lies in their place before). Pipeline: while half n is computed cp.async copies K^T
//   of half n + 1. V of half n is asked for when the vote is known, and O += P V follows behind the scores of half n +
//   1, which hide its copy. Two barriers a half. Rows whose O is not finite are taken once more, with kHeadroom for V.
#pragma once

#include "cuda/near.cuh"
#include "cuda/sm80/forward.cuh"

namespace distr::cuda::sm80 {

struct NearParameters {
  ForwardParameters forward;  // k holds K^T
  const float* key_means;     // [B, Hkv, means, d], where far scores keep them
  std::int32_t* halves;       // [B, Hq, ceil(Nq / 64), 2], or null
};

template <class C>
struct NearStorage {
  struct Stages {
    SharedTile<C::kDim, C::kKeys> keys[2];  // K^T
    SharedTile<C::kKeys, C::kDim> values[2];
  };
  SharedTile<C::kRows, C::kDim> queries;
  union {
    Stages stages;
    SharedTile<C::kRows, C::kDim> query_copy;
  };
  std::int32_t columns[C::kDim];       // at each position of Q and K^T, or -1
  std::uint32_t row_offsets[C::kDim];  // of the rows of K^T that the positions have, in bytes
};

// Which columns the positions of Q and K^T have: those that far scores keep, up to a multiple of 16, then the others.
struct Positions {
  int kept, kept_steps, all_steps;  // columns, and steps of 16 positions

  __device__ Positions(const DeviceProblem& problem, bool exact)
      : kept(exact ? problem.head_dim : problem.groups),
        kept_steps((kept + 15) / 16),
        all_steps(kept_steps + (problem.head_dim - kept + 15) / 16) {}

  // In the order of the columns; -1 where there is none.
  [[nodiscard]] __device__ int rank(int position, int head_dim) const {
    const int dropped = kept + position - kept_steps * 16;
    return position < kept_steps * 16 ? (position < kept ? position : -1) : (dropped < head_dim ? dropped : -1);
  }
};

// The keys 64 half .. 64 half + 63 of one step after another: near ones, then far ones, in ascending order.
struct Halves {
  NearTiles tiles;
  int near, all;               // how many
  int first_whole, whole_end;  // every row of the block sees all keys of those between

  __device__ Halves(const NearTiles& near_tiles, int halves, int first_seen_by_all, int end_seen_by_all)
      : tiles(near_tiles),
        near(2 * near_tiles.near_count() - (halves % 2 != 0 && near_tiles.has(halves / 2) ? 1 : 0)),
        all(max(halves - 2 * near_tiles.begin, 0)),
        first_whole(first_seen_by_all),
        whole_end(end_seen_by_all) {}

  [[nodiscard]] __device__ int at(int n) const {
    const int far = n - near;
    return n < near ? 2 * tiles.near(n / 2) + n % 2 : 2 * tiles.far(far / 2) + far % 2;
  }
  [[nodiscard]] __device__ bool is_whole(int half) const { return half >= first_whole && half < whole_end; }
};

// The state of one thread block.
template <class C>
class NearTask {
 public:
  using Storage = NearStorage<C>;
  using Scores = ScoreFragment<C>[C::kParts];
  using Probabilities = std::uint32_t[C::kParts][C::kPartKeys / 16][C::kRowTiles][4];
  using Output = float[C::kRowTiles][C::kDim / 8][4];

  __device__ NearTask(const NearParameters& parameters, const Work& work, Storage& storage, bool exact)
      : parameters_(parameters), work_(work), storage_(storage), positions_(parameters.forward.problem, exact) {}

  [[nodiscard]] __device__ const Positions& positions() const { return positions_; }

  // Q with its columns in order. All threads call it.
  __device__ void load_queries(bool exact) {
    using T = typename C::Element;
    const ForwardParameters& p = parameters_.forward;
    const DeviceProblem& problem = p.problem;
    const Tile<C::kDim> ordered{ptx::shared_address(&storage_)};
    const Tile<C::kDim> raw{ptx::shared_address(&storage_.query_copy)};
    copy_tile<C::kRows, C::kDim, C::kThreads>(raw, query_rows<C>(p, work_), problem.q.row,
                                              rows_left(work_.row, p.row_end), problem.head_dim);
    ptx::cp_async_commit();
    const std::int32_t* order = p.order + order_index(problem, work_.batch, work_.head, work_.row);
    for (int position = thread(); position < C::kDim; position += C::kThreads) {
      const int rank = positions_.rank(position, problem.head_dim);
      const int column = rank < 0 ? -1 : exact ? rank : order[rank];
      storage_.columns[position] = column;
      // Below 2^32, as the sequence is below 2^22. Behind the last column there is a row of zeros.
      storage_.row_offsets[position] =
          static_cast<std::uint32_t>((column < 0 ? problem.head_dim : column) * p.column_stride * 2);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    const auto at = [&](const Tile<C::kDim>& tile, int row, int column) -> T& {
      auto* const bytes = reinterpret_cast<std::uint8_t*>(&storage_) + (tile.at(row, column / kChunk) - ordered.base);
      return reinterpret_cast<T*>(bytes)[column % kChunk];
    };
    for (int n = thread(); n < C::kRows * C::kDim; n += C::kThreads) {
      const int column = storage_.columns[n % C::kDim];
      at(ordered, n / C::kDim, n % C::kDim) = column < 0 ? T(0.0F) : at(raw, n / C::kDim, column);
    }
    __syncthreads();
  }

  // What the means of dropped columns add to the far scores of this thread's two rows, as logarithms to the base 2.
  __device__ void compute_dropped(int warp_row, float (&dropped)[2]) const {
    const DeviceProblem& problem = parameters_.forward.problem;
    const auto block = static_cast<unsigned>(work_.row) / problem.rows_of_block;
    const float* means = parameters_.key_means + key_means_at(problem, work_.batch, work_.head_kv, block);
    const int lane = thread() % 32;
    const Tile<C::kDim> tile{0};
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + half * 8 + lane / 4;
      float sum = 0;
      for (int position = positions_.kept_steps * 16 + lane % 4; position < positions_.all_steps * 16; position += 4) {
        const int column = storage_.columns[position];
        const auto* chunk =
            reinterpret_cast<const typename C::Element*>(storage_.queries.bytes + tile.at(row, position / kChunk));
        sum = column < 0 ? sum : fmaf(static_cast<float>(chunk[position % kChunk]), means[column], sum);
      }
      dropped[half] = quad_sum(sum) * problem.scale_log2;
    }
  }

  // Issues the copies of K^T, positions 16 first_step .. 16 end_step - 1 of 64 keys.
  __device__ void copy_keys(int half, int stage, int first_step, int end_step) const {
    const ForwardParameters& p = parameters_.forward;
    const std::int64_t head = static_cast<std::int64_t>(work_.batch) * p.problem.heads_kv + work_.head_kv;
    const auto* const k = static_cast<const std::uint16_t*>(p.k) + head * (p.problem.head_dim + 1) * p.column_stride;
    const int row = thread() / kRowChunks;
    const int chunk = thread() % kRowChunks;
    const auto* const from = reinterpret_cast<const char*>(k + half * C::kKeys + chunk * kChunk);
    const std::uint32_t to = keys(stage).at(row, chunk);
    static_assert(C::kThreads / kRowChunks == 16);
#pragma unroll 4
    for (int step = first_step; step < end_step; ++step) {
      ptx::cp_async_16(Tile<C::kKeys>::move(to, step * 16, 0), from + storage_.row_offsets[step * 16 + row], true);
    }
  }

  __device__ void copy_values(int half, int stage) const {
    const ForwardParameters& p = parameters_.forward;
    const DeviceProblem& problem = p.problem;
    const int key = half * C::kKeys;
    const std::uint16_t* const v = head_of(p.v, problem.v, work_.batch, work_.head_kv);
    copy_tile<C::kKeys, C::kDim, C::kThreads>(values(stage), row_of(v, problem.v.row, key), problem.v.row,
                                              rows_left(key, problem.seq_k), problem.head_dim_v);
  }

  // S from the first 16 steps positions, hidden keys -inf.
  __device__ void scores(Scores& s, int warp_row, int half, int stage, int steps, const Halves& halves) const {
    const int lane = thread() % 32;
    const std::uint32_t q = Tile<C::kDim>{ptx::shared_address(&storage_)}.at(warp_row + lane % 16, lane / 16);
    const std::uint32_t k = keys(stage).at(lane % 16, lane / 16);
#pragma unroll
    for (ScoreFragment<C>& part : s) {
      part = {};
    }
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, Tile<C::kDim>::move(q, 0, step * 2));
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
        for (int n = 0; n < C::kPartKeys / 16; ++n) {
          std::uint32_t b[4];
          ptx::ldmatrix_x4_trans(b, Tile<C::kKeys>::move(k, step * 16, part * C::kPartKeys / 8 + n * 2));
          ptx::mma_16x8x16(s[part].of[0][2 * n], a, b[0], b[1], typename C::Element{});
          ptx::mma_16x8x16(s[part].of[0][2 * n + 1], a, b[2], b[3], typename C::Element{});
        }
      }
    }
    if (halves.is_whole(half)) {
      return;
    }
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      if (has_mask()) {
        scale_scores(s[part], parameters_.forward.problem.scale_log2);
      }
      apply_mask<C>(s[part], parameters_.forward, work_, warp_row, half * C::kKeys + part * C::kPartKeys);
    }
  }

  // O += P V. All threads call it. repeats: with kHeadroom.
  __device__ void add_values(Output& o, const Probabilities& probabilities, int stage, bool repeats) {
    if (repeats) {
      make_headroom<C>(storage_.stages.values[stage]);
    }
    const int lane = thread() % 32;
    const std::uint32_t value = values(stage).at(lane % 16, lane / 16);
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      accumulate<C, C::kPartKeys / 16>(o, probabilities[part], value, part * C::kPartKeys, 0);
    }
  }

  [[nodiscard]] __device__ bool has_mask() const { return parameters_.forward.problem.mask.kind != MaskKind::none; }

 private:
  static constexpr int kRowChunks = C::kKeys / kChunk;  // of a row of K^T

  [[nodiscard]] __device__ static int thread() { return static_cast<int>(ptx::opaque(threadIdx.x)); }
  [[nodiscard]] __device__ Tile<C::kKeys> keys(int stage) const {
    return {ptx::shared_address(&storage_.stages.keys[0]) +
            static_cast<std::uint32_t>(stage) * static_cast<std::uint32_t>(sizeof(storage_.stages.keys[0]))};
  }
  [[nodiscard]] __device__ Tile<C::kDim> values(int stage) const {
    return {ptx::shared_address(&storage_.stages.values[0]) +
            static_cast<std::uint32_t>(stage) * static_cast<std::uint32_t>(sizeof(storage_.stages.values[0]))};
  }

  const NearParameters& parameters_;
  const Work& work_;
  Storage& storage_;
  Positions positions_;
};

// Whether a score of one of the thread's rows is above the row's limit; NaN is.
template <class C>
[[nodiscard]] __device__ inline bool is_above(const ScoreFragment<C> (&s)[C::kParts], const float (&limit)[2]) {
  bool above = false;
#pragma unroll
  for (const ScoreFragment<C>& part : s) {
#pragma unroll
    for (const auto& fragment : part.of[0]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        above |= !(fragment[i] <= limit[i / 2]);
      }
    }
  }
  return above;
}

// What a warp's rows from `first_row` on take from their near keys to the far ones: limits, and the row max.
template <class C>
__device__ __forceinline__ void begin_far_keys(const ForwardParameters& p, int first_row, const float (&dropped)[2],
                                               Softmax<C>& softmax, float (&limit)[2]) {
  const DeviceNear& near = p.problem.near;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float near_sum = quad_sum(softmax.row_sum[0][half]);
    const float lse = near_sum == 0.0F ? -INFINITY : softmax.row_max[0][half] + log2f(near_sum);
    const int row = first_row + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
    limit[half] = row < p.row_end ? (lse + near.skip_log2 - dropped[half]) / softmax.scale : INFINITY;
    softmax.row_max[0][half] -= near.keeps_means ? dropped[half] : 0.0F;
  }
}

// How many far halves the rows kept and see.
template <class C>
__device__ inline void store_halves(const NearParameters& parameters, const Work& work, int kept, int seen) {
  const DeviceProblem& problem = parameters.forward.problem;
  if (parameters.halves != nullptr && threadIdx.x == 0) {
    const std::int64_t tiles = (problem.seq_q + C::kRows - 1) / C::kRows;
    const std::int64_t head = work.batch * problem.heads_q + work.head;
    std::int32_t* const to = parameters.halves + 2 * (head * tiles + work.row / C::kRows);
    to[0] = kept;
    to[1] = seen;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kDim == 64 ? 3 : 2)
    near_forward(const __grid_constant__ NearParameters parameters) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& storage = *reinterpret_cast<NearStorage<C>*>(shared);
  static_assert(sizeof(NearStorage<C>) <= kMaxSharedBytes && C::kRowTiles == 1);
  launch_dependent_grids();
  wait_on_dependent_grids();
  const ForwardParameters& p = parameters.forward;
  const DeviceProblem& problem = p.problem;
  const Work work = Work::of(blockIdx.x, p, C{});
  const bool exact = problem.exact || (problem.first_block_is_exact && work.row < problem.block);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  NearTask<C> task(parameters, work, storage, exact);
  task.load_queries(exact);
  float dropped[2] = {};
  if (problem.near.has_means && !exact) {
    task.compute_dropped(warp_row, dropped);
  }
  __syncthreads();
  const Halves halves(near_tiles(problem, work.row, std::int64_t{work.last} * C::kKeys), work.last,
                      first_whole_tile<C>(problem, work), unmasked_tiles<C>(p, work));
  const Positions& positions = task.positions();
  const auto steps_of = [&](int n) { return n < halves.near ? positions.all_steps : positions.kept_steps; };

  int kept_halves = 0;
  int seen_halves = 0;
  unsigned rows = kAllRows<C>;  // that are not written yet
  bool repeats = false;         // rows whose O was not finite, with kHeadroom
  do {
    float o[C::kRowTiles][C::kDim / 8][4] = {};
    Softmax<C> softmax(task.has_mask() ? 1.0F : problem.scale_log2);
    typename NearTask<C>::Probabilities probabilities;
    float limit[2] = {-INFINITY, -INFINITY};
    bool pending = false;
    kept_halves = seen_halves = 0;
    if (halves.all > 0) {
      task.copy_keys(halves.at(0), 0, 0, steps_of(0));
    }
    ptx::cp_async_commit();
    ptx::cp_async_commit();  // in the place of V of a half before the first
#pragma unroll 1
    for (int n = 0; n < halves.all; ++n) {
      const int half_tile = halves.at(n);
      const int stage = n % 2;
      const bool is_far = n >= halves.near;
      ptx::cp_async_wait<1>();
      __syncthreads();  // K^T has arrived, and no warp reads the other stage any more
      if (n + 1 < halves.all) {
        task.copy_keys(halves.at(n + 1), 1 - stage, 0, steps_of(n + 1));
      }
      ptx::cp_async_commit();
      if (n == halves.near) {  // the near keys are behind us
        begin_far_keys<C>(p, work.row + warp_row, dropped, softmax, limit);
      }
      ScoreFragment<C> s[C::kParts];
      task.scores(s, warp_row, half_tile, stage, steps_of(n), halves);
      ptx::cp_async_wait<1>();  // V of the half before has arrived, for all threads behind the vote
      bool keeps = true;
      if (is_far && problem.near.skips) {
        keeps = is_above<C>(s, limit);
      }
      keeps = __syncthreads_or(keeps ? 1 : 0) != 0;
      if (is_far && problem.near.skips && parameters.halves != nullptr) {
        bool seen = half_tile >= work.first;  // by the first row or the last
        if (task.has_mask()) {
          const float hidden[2] = {limit[0] == INFINITY ? INFINITY : -INFINITY,
                                   limit[1] == INFINITY ? INFINITY : -INFINITY};
          seen = __syncthreads_or(is_above<C>(s, hidden) ? 1 : 0) != 0;
        }
        seen_halves += seen ? 1 : 0;
        kept_halves += keeps ? 1 : 0;
      }
      const bool finishes = keeps && is_far && problem.near.finishes && positions.all_steps > positions.kept_steps;
      if (finishes) {
        task.copy_keys(half_tile, stage, positions.kept_steps, positions.all_steps);
        ptx::cp_async_commit();
      }
      if (keeps) {
        task.copy_values(half_tile, stage);
      }
      ptx::cp_async_commit();
      if (pending) {
        task.add_values(o, probabilities, 1 - stage, repeats);
      }
      if (finishes) {
        ptx::cp_async_wait<1>();
        __syncthreads();
        task.scores(s, warp_row, half_tile, stage, positions.all_steps, halves);
      }
      pending = keeps;
      if (keeps) {
        softmax.update_row_max(s, o);
#pragma unroll
        for (int part = 0; part < C::kParts; ++part) {
          softmax.exponentials(s[part], probabilities[part]);
        }
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (pending) {
      task.add_values(o, probabilities, (halves.all - 1) % 2, repeats);
    }
    if (halves.all > halves.near && problem.near.keeps_means) {
      softmax.row_max[0][0] += dropped[0];
      softmax.row_max[0][1] += dropped[1];
    }
    const unsigned in_range = repeats ? kAllRows<C> : rows_in_range<C>(o, softmax, kAllTiles, 0);
    store<C>(p, work, warp_row, rows & in_range, o, softmax, repeats ? kHeadroom<C> : 1.0F);
    rows &= ~in_range;
    repeats = __syncthreads_or(static_cast<int>(rows)) != 0;
  } while (repeats);
  store_halves<C>(parameters, work, kept_halves, seen_halves);
}

}  // namespace distr::cuda::sm80
