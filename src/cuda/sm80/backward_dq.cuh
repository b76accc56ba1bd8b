// SPDX-License-Identifier: Apache-2.0
// dQ with mma.sync, for sm_80 and later (method, 3).
//
//   A thread block owns kRows queries of a head, and each of its 4 warps owns 16 kRowTiles of them. For every tile of
//   kKeys keys, kKeysPerStep keys at a time, a warp computes
//     S = Q~ K^T, dP = dO V^T                 [16 kRowTiles, kKeysPerStep]   in registers
//     P = 2^(scale S - LSE), dS = P (dP - D)                              in the same registers
//     dQ~ += dS K                             [16 kRowTiles, d]           in registers
//   and at the end dQ from dQ~ (backward_epilogue.cuh).
//   Shared memory: DqStorage (backward_config.h). Q~ and dO of the thread block; two stages of (K, V); LSE and D. The
//   epilogue of grouped attention has DqEpilogue in the place of all of them.
//   Pipeline: while the warps compute one tile, cp.async copies the next one to the other stage; one barrier for each
//   tile.
#pragma once

#include <climits>

#include "cuda/sm80/backward_epilogue.cuh"
#include "cuda/sm80/backward_tile.cuh"

namespace distr::cuda::sm80 {

// result += A B^T for this warp's rows of A and kKeysPerStep rows of B. `left` and `right` are the shared addresses of
// the lane's parts of their first fragments.
template <class C>
__device__ __forceinline__ void multiply_columns(float (&result)[C::kRowTiles][C::kKeysPerStep / 8][4],
                                                 std::uint32_t left, std::uint32_t right) {
#pragma unroll
  for (int step = 0; step < C::kDim / 16; ++step) {
    std::uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      ptx::ldmatrix_x4(a[m], Tile<C::kDim>::move(left, m * 16, step * 2));
    }
#pragma unroll
    for (int n = 0; n < C::kKeysPerStep / 16; ++n) {
      std::uint32_t b[4];
      ptx::ldmatrix_x4(b, Tile<C::kDim>::move(right, n * 16, step * 2));
      multiply<typename C::Element>(result, a, b, n);
    }
  }
}

// Turns dp into dS, for this warp's part of the queries from `first_row` on and the kKeysPerStep keys from `key` on.
// `edge` says that some query does not see some key.
template <class C>
__device__ __forceinline__ void differentiate_queries(float (&s)[C::kRowTiles][C::kKeysPerStep / 8][4],
                                                      float (&dp)[C::kRowTiles][C::kKeysPerStep / 8][4],
                                                      const BackwardParameters& p, const float2* stats,
                                                      const TileCoord& coord, int first_row, int key, bool edge) {
  const DeviceProblem& problem = p.problem;
  const int thread = static_cast<int>(ptx::opaque(threadIdx.x));
  const int lane = thread % 32;
  const int own_row = thread / 32 * 16 * C::kRowTiles + lane / 4;
  const int of_row = first_row + own_row;  // row and key of element 0
  const int of_key = key + lane % 4 * 2;
  // Calls visit(s, dp, rows, keys) for each element; `rows` and `keys` are its distances from element 0.
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int n = 0; n < C::kKeysPerStep / 8; ++n) {
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          visit(s[m][n][i], dp[m][n][i], m * 16 + i / 2 * 8, n * 8 + i % 2);
        }
      }
    }
  };
  float scale = problem.scale_log2;
  const bool is_capped = C::kMasks && problem.softcap != 0;
  if (is_capped) {
    each([&](float& score, float& gradient, int rows, int) { cap(problem, score, gradient, stats[own_row + rows].y); });
    scale = 1;
  }
  if (C::kMasks && problem.mask.kind != MaskKind::none) {
    each([&](float& score, float&, int rows, int keys) {
      score = under_mask(problem, score * scale, coord.batch, coord.head, of_row + rows, of_key + keys);
    });
    scale = 1;
  }
  if (edge) {  // a row sees keys at distances `first` to `last`, here in rows and keys from element 0
    const int left = static_cast<int>(problem.seq_k) - of_key;
    const int last = problem.causal ? of_row + static_cast<int>(problem.causal_offset) - of_key : INT_MAX;
    const int first = has_left_end(problem) ? of_row + static_cast<int>(problem.first_offset) - of_key : INT_MIN;
    each([&](float& score, float& gradient, int rows, int keys) {
      hide(score, gradient, keys >= left || keys - rows > last || keys - rows < first);
    });
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 own = stats[own_row + m * 16 + half * 8];
#pragma unroll
      for (int n = 0; n < C::kKeysPerStep / 8; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          differentiate<C>(s[m][n][i], dp[m][n][i], scale, own.x, is_capped ? 0.0F : own.y);
        }
      }
    }
  }
}

// cta_of(block): the thread block's number among those of the problem.
template <class C, class CtaOf>
__device__ __forceinline__ void differentiate_by_queries(const BackwardParameters& p, const CtaOf& cta_of) {
  using T = typename C::Element;
  using Stage = typename C::Storage::Stage;
  using MainLoop = typename C::Storage::MainLoop;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& storage = *reinterpret_cast<typename C::Storage*>(shared);
  static_assert(sizeof(storage) <= kMaxSharedBytes);
  const DeviceProblem& problem = p.problem;
  const auto coord_of = [&](unsigned cta) {
    const auto tiles = static_cast<unsigned>((problem.seq_q + C::kRows - 1) / C::kRows);
    TileCoord coord = TileCoord::of(cta, static_cast<int>(problem.heads_q), problem.batch, tiles, p.interleaved);
    coord.tile = static_cast<int>(tiles) - 1 - coord.tile;  // the last queries come first: they see most keys
    return coord;
  };
  const auto warp_row_of = [](unsigned thread) { return static_cast<int>(thread / 32) * 16 * C::kRowTiles; };
  const TileCoord coord = coord_of(cta_of(blockIdx.x));
  const int head_kv = coord.head / static_cast<int>(problem.heads_q / problem.heads_kv);
  const int first_row = coord.tile * C::kRows;
  const int warp_row = warp_row_of(threadIdx.x);

  // Any of the queries sees at most the first `keys` keys, and every query sees the first `all`, but for those that
  // come before the left end of a sliding window.
  const auto seen_by = [&](std::int64_t row) {
    return problem.causal ? static_cast<int>(min(max(row + problem.causal_offset + 1, std::int64_t{0}), problem.seq_k))
                          : static_cast<int>(problem.seq_k);
  };
  const int keys = seen_by(min(std::int64_t{first_row} + C::kRows, problem.seq_q) - 1);
  const int all = seen_by(first_row);
  const int tiles = (keys + C::kKeys - 1) / C::kKeys;
  const int first_tile = has_left_end(problem) ? static_cast<int>(first_visible_key(problem, first_row)) / C::kKeys : 0;

  constexpr std::uint32_t kDo = offsetof(MainLoop, d_o);
  constexpr std::uint32_t kStats = offsetof(MainLoop, stats);
  constexpr std::uint32_t kValues = offsetof(Stage, values);
  const std::uint32_t base = ptx::shared_address(shared);
  const auto stage_of = [&](int t) {
    constexpr std::uint32_t kStages = offsetof(MainLoop, stages);
    constexpr std::uint32_t kStageBytes = sizeof(Stage);
    return base + kStages + static_cast<std::uint32_t>(t % kBackwardStages) * kStageBytes;
  };
  const T* k = static_cast<const T*>(p.k) + coord.batch * problem.k.batch + head_kv * problem.k.head +
               first_tile * C::kKeys * problem.k.row;
  const T* v = static_cast<const T*>(p.v) + coord.batch * problem.v.batch + head_kv * problem.v.head +
               first_tile * C::kKeys * problem.v.row;
  const auto copy_next = [&](int t) {
    const std::uint32_t to = stage_of(t);
    const int left = rows_left(t * C::kKeys, problem.seq_k);
    copy_tile<C::kKeys, C::kDim, C::kThreads>(Tile<C::kDim>{to}, k, problem.k.row, left, problem.head_dim);
    copy_tile<C::kKeys, C::kDim, C::kThreads>(Tile<C::kDim>{to + kValues}, v, problem.v.row, left, problem.head_dim_v);
    k += C::kKeys * problem.k.row;
    v += C::kKeys * problem.v.row;
  };
  const auto copy_own = [&](const void* tensor, const Strides& strides, int columns, std::uint32_t to) {
    const T* from = static_cast<const T*>(tensor) + coord.batch * strides.batch + coord.head * strides.head;
    copy_tile<C::kRows, C::kDim, C::kThreads>(Tile<C::kDim>{to}, from + first_row * strides.row, strides.row,
                                              rows_left(first_row, problem.seq_q), columns);
  };
  copy_own(p.q, problem.q, problem.head_dim, base);
  copy_own(p.d_o, problem.o, problem.head_dim_v, base + kDo);
  if (const int thread = static_cast<int>(threadIdx.x); thread < C::kRows / 2) {
    const std::int64_t head = std::int64_t{coord.batch} * problem.heads_q + coord.head;
    ptx::cp_async_16(base + kStats + thread * 16, p.stats + head * p.stats_rows + first_row + thread * 2, true);
  }
  if (first_tile < tiles) {
    copy_next(first_tile);
  }
  ptx::cp_async_commit();

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t own = Tile<C::kDim>{base}.at(warp_row + lane % 16, lane / 16);

  float d_q[C::kRowTiles][C::kDim / 8][4] = {};
  for (int t = first_tile; t < tiles; ++t) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // tile t has arrived, and no warp reads the other stage any more
    if (t + 1 < tiles) {
      copy_next(t + 1);
    }
    ptx::cp_async_commit();

    const bool edge = (t + 1) * C::kKeys > all ||
                      (has_left_end(problem) && t * C::kKeys < first_row + C::kRows - 1 + problem.first_offset);
    const std::uint32_t stage = stage_of(t);
    const int thread = static_cast<int>(ptx::opaque(threadIdx.x)) % 32;
    const std::uint32_t as_columns = Tile<C::kDim>{stage}.at(thread / 16 * 8 + thread % 8, thread / 8 % 2);
    const std::uint32_t as_rows = Tile<C::kDim>{stage}.at(thread % 16, thread / 16);
#pragma unroll 1
    for (int key = 0; key < C::kKeys; key += C::kKeysPerStep) {
      float s[C::kRowTiles][C::kKeysPerStep / 8][4] = {};
      float dp[C::kRowTiles][C::kKeysPerStep / 8][4] = {};
      const std::uint32_t columns = Tile<C::kDim>::move(as_columns, key, 0);
      multiply_columns<C>(s, own, columns);
      multiply_columns<C>(dp, own + kDo, columns + kValues);
      differentiate_queries<C>(s, dp, p, storage.loop.stats, coord, first_row, t * C::kKeys + key, edge);
#pragma unroll
      for (int n = 0; n < C::kKeysPerStep / 16; ++n) {
        std::uint32_t a[C::kRowTiles][4];
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          as_operand<T>(a[m], dp[m][2 * n], dp[m][2 * n + 1]);
        }
        accumulate_rows<T, C::kDim>(d_q, a, Tile<C::kDim>::move(as_rows, key + n * 16, 0));
      }
    }
  }

  ptx::cp_async_wait<0>();
  const TileCoord end = coord_of(cta_of(ptx::opaque(blockIdx.x)));
  const int end_row = warp_row_of(ptx::opaque(threadIdx.x));
  store_dq<C>(p, end, end_row, storage, d_q);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    backward_dq(const __grid_constant__ BackwardParameters p) {
  launch_dependent_grids();  // backward_dkdv takes the room that is left
  differentiate_by_queries<C>(p, [](unsigned block) { return block; });
}

// The same of packed sequences; `ctas`: of a sequence.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    sequences_dq(const __grid_constant__ BackwardParameters launched, unsigned ctas) {
  launch_dependent_grids();
  __shared__ OwnParameters<BackwardParameters> own;
  static_assert(sizeof(typename C::Storage) + 1024 <= kMaxSharedBytes);  // the storage begins at a multiple of it
  const BackwardParameters& p = parameters_of<typename C::Element>(launched, own, blockIdx.x / ctas);
  if (blockIdx.x % ctas < p.problem.heads_q * ((p.problem.seq_q + C::kRows - 1) / C::kRows)) {
    differentiate_by_queries<C>(p, [=](unsigned block) { return block % ctas; });
  }
}

}  // namespace distr::cuda::sm80
