// SPDX-License-Identifier: Apache-2.0
// dK and dV, and where the order of summation is free also dQ, with mma.sync, for sm_80 and later (method, 3).
//
//   A thread block owns kKeys keys of a KV head. Each of its warps owns 16 kKeyTiles of them and holds their K and V as
//   left operands. For every query head of the KV head and every tile of kRows queries, 16 queries at a time, a warp
//   computes
//     S^T = K Q~^T, dP^T = V dO^T             [16 kKeyTiles, 16]   in registers
//     P = 2^(scale S - LSE), dS = P (dP - D)                       in the same registers
//     dV += P^T dO, dK += dS^T Q~             [16 kKeyTiles, d]    in registers
//   The accumulators of S^T and dP^T have the layout of a left operand, so P and dS never leave the registers on their
//   way to dV and dK, and both sums have a fixed order. Where the kernel adds up dQ as well, dS^T goes to shared memory
//   too (backward_dq_atomics.cuh).
//   Shared memory: DkDvStorage (backward_config.h). K and V, unless the warps hold them in registers; dS^T, if dQ is
//   wanted; two stages of (Q~, dO, LSE and D).
//   Pipeline: while the warps compute one tile, cp.async copies the next one to the other stage. There is one barrier
//   for each tile, and a second one for dQ.
#pragma once

#include <climits>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm80/backward_dq_atomics.cuh"
#include "cuda/sm80/backward_tile.cuh"

namespace distr::cuda::sm80 {

// K or V of a warp's keys as left operands, held in registers. `start` is the shared address of this lane's part of the
// first fragment.
template <class C>
class RegisterRows {
 public:
  __device__ explicit RegisterRows(std::uint32_t start) {
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
#pragma unroll
      for (int m = 0; m < C::kKeyTiles; ++m) {
        ptx::ldmatrix_x4(fragments_[step][m], Tile<C::kDim>::move(start, m * 16, step * 2));
      }
    }
  }
  __device__ void fragments(std::uint32_t (&a)[C::kKeyTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < C::kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[m][i] = fragments_[step][m][i];
      }
    }
  }

 private:
  std::uint32_t fragments_[C::kDim / 16][C::kKeyTiles][4];
};

// The same operands, left in shared memory and loaded for each product.
template <class C>
class SharedRows {
 public:
  __device__ explicit SharedRows(std::uint32_t start) : start_(start) {}
  __device__ void fragments(std::uint32_t (&a)[C::kKeyTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < C::kKeyTiles; ++m) {
      ptx::ldmatrix_x4(a[m], Tile<C::kDim>::move(start_, m * 16, step * 2));
    }
  }

 private:
  std::uint32_t start_;
};

template <class C>
[[nodiscard]] __device__ inline bool has_left_end(const DeviceProblem& problem) {
  return C::kWindows && cuda::has_left_end(problem);
}

// The first row of the first tile of queries that sees any of a thread block's keys.
template <class C>
[[nodiscard]] __device__ inline int first_row(const DeviceProblem& problem, int first_key) {
  if (!problem.causal) {
    return 0;
  }
  const std::int64_t row = min(max(first_key - problem.causal_offset, std::int64_t{0}), problem.seq_q);
  return static_cast<int>(row) / C::kRows * C::kRows;
}

// Behind the last row that sees any of a thread block's keys.
template <class C>
[[nodiscard]] __device__ inline int row_end(const DeviceProblem& problem, int first_key) {
  const auto rows = static_cast<int>(problem.seq_q);
  return has_left_end<C>(problem) ? max(min(first_key + C::kKeys - static_cast<int>(problem.first_offset), rows), 0)
                                  : rows;
}

// A tile of queries. The kernel goes through the tiles of one query head after the other.
struct QueryTile {
  int head, row;
};

// The tile before `next`. It is computed because the registers to remember it are scarce.
template <class C>
[[nodiscard]] __device__ inline QueryTile before(const DeviceProblem& problem, const QueryTile& next, int first_key) {
  if (next.row > first_row<C>(problem, first_key)) {
    return {next.head, next.row - C::kRows};
  }
  return {next.head - 1, (row_end<C>(problem, first_key) - 1) / C::kRows * C::kRows};
}

// The tiles of queries in shared memory: two stages of Q~, dO and their statistics.
template <class C>
struct QueryStages {
  using Stage = typename C::Storage::Stage;
  using MainLoop = typename C::Storage::MainLoop;
  static constexpr std::uint32_t kDo = offsetof(Stage, d_o);

  const BackwardParameters& p;
  std::uint32_t base;  // the storage's address
  int batch;

  // The address of Q~ of tile t.
  [[nodiscard]] __device__ std::uint32_t at(int t) const {
    constexpr std::uint32_t kStages = offsetof(MainLoop, stages);
    constexpr std::uint32_t kStageBytes = sizeof(Stage);
    return base + kStages + static_cast<std::uint32_t>(t % kBackwardStages) * kStageBytes;
  }
  // Where the statistics of tile t lie, in bytes from the beginning of the storage.
  [[nodiscard]] __device__ static std::uint32_t stats_offset(int t) {
    constexpr std::uint32_t kStats = offsetof(MainLoop, stats);
    constexpr std::uint32_t kStatsBytes = sizeof(float2) * C::kRows;
    return kStats + static_cast<std::uint32_t>(t % kBackwardStages) * kStatsBytes;
  }
  __device__ void copy(int t, const QueryTile& tile) const {
    const DeviceProblem& problem = p.problem;
    const int left = rows_left(tile.row, problem.seq_q);
    const auto copy_rows = [&](const void* tensor, const Strides& strides, int columns, std::uint32_t to) {
      const auto* from =
          static_cast<const typename C::Element*>(tensor) + batch * strides.batch + tile.head * strides.head;
      copy_tile<C::kRows, C::kDim, C::kThreads>(Tile<C::kDim>{to}, from + tile.row * strides.row, strides.row, left,
                                                columns);
    };
    copy_rows(p.q, problem.q, problem.head_dim, at(t));
    copy_rows(p.d_o, problem.o, problem.head_dim_v, at(t) + kDo);
    const auto thread = ptx::opaque(threadIdx.x);
    if (thread < C::kRows / 2) {
      const float2* stats = p.stats + (batch * problem.heads_q + tile.head) * p.stats_rows + tile.row;
      ptx::cp_async_16(base + stats_offset(t) + thread * 16, stats + thread * 2, true);
    }
  }
};

// Turns s into P^T and dp into dS^T, for the 16 queries from `row` on and this warp's part of the keys from `first_key`
// on. `edge` says that some query does not see some key.
template <class C>
__device__ __forceinline__ void differentiate_keys(float (&s)[C::kKeyTiles][2][4], float (&dp)[C::kKeyTiles][2][4],
                                                   const BackwardParameters& p, const float2* stats, int batch,
                                                   int head, int row, int first_key, bool edge) {
  const DeviceProblem& problem = p.problem;
  const int thread = static_cast<int>(ptx::opaque(threadIdx.x));
  // Calls visit(s, dp, rows, keys) for each element; `rows` and `keys` are its distances from element 0.
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int m = 0; m < C::kKeyTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          visit(s[m][n][i], dp[m][n][i], n * 8 + i % 2, m * 16 + i / 2 * 8);
        }
      }
    }
  };
  float scale = problem.scale_log2;
  const bool is_capped = C::kMasks && problem.softcap != 0;
  if (is_capped) {
    each([&](float& score, float& gradient, int rows, int) {
      cap(problem, score, gradient, stats[thread % 4 * 2 + rows].y);
    });
    scale = 1;
  }
  if (C::kMasks && problem.mask.kind != MaskKind::none) {
    const int of_row = row + thread % 4 * 2;
    const int of_key = first_key + thread / 32 * 16 * C::kKeyTiles + thread % 32 / 4;
    each([&](float& score, float&, int rows, int keys) {
      score = under_mask(problem, score * scale, batch, head, of_row + rows, of_key + keys);
    });
    scale = 1;
  }
  if (edge) {  // a row sees the keys whose distance from it is `first` to `last`
    const int last = problem.causal ? static_cast<int>(problem.causal_offset) : INT_MAX;
    const int first = has_left_end<C>(problem) ? static_cast<int>(problem.first_offset) : INT_MIN;
    const int of_element = first_key - row + thread / 32 * 16 * C::kKeyTiles + thread % 32 / 4 - thread % 4 * 2;
    each([&](float& score, float& gradient, int rows, int keys) {
      const int distance = of_element + keys - rows;
      hide(score, gradient, distance > last || distance < first);
    });
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float4 pair = *reinterpret_cast<const float4*>(stats + n * 8 + thread % 4 * 2);
#pragma unroll
    for (int m = 0; m < C::kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float d = i % 2 == 0 ? pair.y : pair.w;
        differentiate<C>(s[m][n][i], dp[m][n][i], scale, i % 2 == 0 ? pair.x : pair.z, is_capped ? 0.0F : d);
      }
    }
  }
}

// cta_of(block): the thread block's number among those of the problem.
template <class C, class CtaOf>
__device__ __forceinline__ void differentiate_by_keys(const BackwardParameters& p, const CtaOf& cta_of) {
  using T = typename C::Element;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  static_assert(sizeof(typename C::Storage) <= C::kSharedLimit);
  const DeviceProblem& problem = p.problem;
  const auto coord_of = [&](unsigned cta) {
    return TileCoord::of(cta, static_cast<int>(problem.heads_kv), problem.batch,
                         static_cast<unsigned>((problem.seq_k + C::kKeys - 1) / C::kKeys), p.interleaved);
  };
  const auto warp_key = [](unsigned thread) { return static_cast<int>(thread / 32) * 16 * C::kKeyTiles; };
  const TileCoord coord = coord_of(cta_of(blockIdx.x));
  const int first_key = coord.tile * C::kKeys;
  const int part = static_cast<int>(blockIdx.y);
  const int heads = static_cast<int>(problem.heads_q / problem.heads_kv);  // query heads that read the KV head
  QueryTile next{coord.head * heads, first_row<C>(problem, first_key)};
  const int tiles = (row_end<C>(problem, first_key) - next.row + C::kRows - 1) / C::kRows * heads;

  const std::uint32_t base = ptx::shared_address(shared);
  const QueryStages<C> stages{p, base, coord.batch};

  // K and V of the thread block pass through shared memory to the operands.
  constexpr std::uint32_t kValues = offsetof(typename C::Storage::Own, values);
  const auto copy_own = [&](const void* tensor, const Strides& strides, int columns, std::uint32_t to) {
    const T* from = static_cast<const T*>(tensor) + coord.batch * strides.batch + coord.head * strides.head;
    copy_tile<C::kKeys, C::kDim, C::kThreads>(Tile<C::kDim>{to}, from + first_key * strides.row, strides.row,
                                              rows_left(first_key, problem.seq_k), columns);
  };
  copy_own(p.k, problem.k, problem.head_dim, base);
  copy_own(p.v, problem.v, problem.head_dim_v, base + kValues);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t own = Tile<C::kDim>{base}.at(warp_key(threadIdx.x) + lane % 16, lane / 16);
  const typename C::OwnRows k(own);
  const typename C::OwnRows v(own + kValues);
  __syncthreads();

  float d_k[C::kKeyTiles][C::kColumns / 8][4] = {};
  float d_v[C::kKeyTiles][C::kColumns / 8][4] = {};
  if (tiles > 0) {
    stages.copy(0, next);
  }
  ptx::cp_async_commit();
  for (int t = 0; t < tiles; ++t) {
    const int head = next.head;
    const int first = next.row;
    next.row += C::kRows;
    if (next.row >= row_end<C>(problem, first_key)) {
      next = {head + 1, first_row<C>(problem, first_key)};
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // tile t has arrived, and no warp reads the other stage any more
    if (t + 1 < tiles) {
      stages.copy(t + 1, next);
    }
    ptx::cp_async_commit();

    const bool edge = (problem.causal && first_key + C::kKeys - 1 > first + problem.causal_offset) ||
                      (has_left_end<C>(problem) && first_key < first + C::kRows - 1 + problem.first_offset);
    const std::uint32_t stage = stages.at(t);
    const int thread = static_cast<int>(ptx::opaque(threadIdx.x)) % 32;
    const std::uint32_t as_columns = Tile<C::kDim>{stage}.at(thread / 16 * 8 + thread % 8, thread / 8 % 2);
    const std::uint32_t as_rows = Tile<C::kDim>{stage}.at(thread % 16, thread / 16 + part * (C::kColumns / kChunk));
#pragma unroll 1
    for (int row = 0; row < C::kRows; row += 16) {
      float s[C::kKeyTiles][2][4] = {};
      float dp[C::kKeyTiles][2][4] = {};
      const std::uint32_t q = Tile<C::kDim>::move(as_columns, row, 0);
#pragma unroll
      for (int step = 0; step < C::kDim / 16; ++step) {
        std::uint32_t a[C::kKeyTiles][4];
        std::uint32_t b[4];
        k.fragments(a, step);
        ptx::ldmatrix_x4(b, Tile<C::kDim>::move(q, 0, step * 2));
        multiply<T>(s, a, b, 0);
        v.fragments(a, step);
        ptx::ldmatrix_x4(b, Tile<C::kDim>::move(q, 0, step * 2) + stages.kDo);
        multiply<T>(dp, a, b, 0);
      }
      differentiate_keys<C>(s, dp, p, reinterpret_cast<const float2*>(shared + stages.stats_offset(t)) + row,
                            coord.batch, head, first + row, first_key, edge);
      std::uint32_t p_operand[C::kKeyTiles][4];
      std::uint32_t ds_operand[C::kKeyTiles][4];
#pragma unroll
      for (int m = 0; m < C::kKeyTiles; ++m) {
        as_operand<T>(p_operand[m], s[m][0], s[m][1]);
        as_operand<T>(ds_operand[m], dp[m][0], dp[m][1]);
      }
      if constexpr (C::kAccumulatesDq) {
        store_ds<C>(base, row, static_cast<int>(problem.seq_k) - first_key, ds_operand);
      }
      const std::uint32_t q_rows = Tile<C::kDim>::move(as_rows, row, 0);
      accumulate_rows<T, C::kDim>(d_v, p_operand, q_rows + stages.kDo);
      accumulate_rows<T, C::kDim>(d_k, ds_operand, q_rows);
    }
    if constexpr (C::kAccumulatesDq) {
      __syncthreads();  // all warps have stored their dS of the tile
      const QueryTile tile = before<C>(problem, next, first_key);
      accumulate_dq<C>(p, base, coord.batch, tile.head, tile.row, part);
    }
  }

  const TileCoord end = coord_of(cta_of(ptx::opaque(blockIdx.x)));
  const auto store = [&](void* to, const Strides& strides, int columns, float factor, const auto& sums) {
    T* const rows = static_cast<T*>(to) + end.batch * strides.batch + end.head * strides.head;
    store_rows(rows, strides.row, end.tile * C::kKeys + warp_key(ptx::opaque(threadIdx.x)), problem.seq_k,
               part * C::kColumns, columns, factor, sums);
  };
  store(p.d_k, p.d_k_strides, problem.head_dim, p.scale, d_k);
  store(p.d_v, p.d_v_strides, problem.head_dim_v, 1.0F, d_v);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    backward_dkdv(const __grid_constant__ BackwardParameters p) {
  differentiate_by_keys<C>(p, [](unsigned block) { return block; });
  wait_on_dependent_grids();  // for backward_dq, if it runs beside: so whatever follows finds dQ, too
}

// The same of packed sequences; `ctas`: of a sequence.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    sequences_dkdv(const __grid_constant__ BackwardParameters launched, unsigned ctas) {
  __shared__ OwnParameters<BackwardParameters> own;
  static_assert(sizeof(typename C::Storage) + 1024 <= kMaxSharedBytes);  // the storage begins at a multiple of it
  const BackwardParameters& p = parameters_of<typename C::Element>(launched, own, blockIdx.x / ctas);
  if (blockIdx.x % ctas < p.problem.heads_kv * ((p.problem.seq_k + C::kKeys - 1) / C::kKeys)) {
    differentiate_by_keys<C>(p, [=](unsigned block) { return block % ctas; });
  }
  wait_on_dependent_grids();  // as above
}

}  // namespace distr::cuda::sm80
