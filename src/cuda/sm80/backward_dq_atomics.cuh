// SPDX-License-Identifier: Apache-2.0
// dQ~ as a sum over thread blocks, for callers that let the order of the sum change from run to run.
//
//   The warps of backward_dkdv store their dS^T of a tile, [kKeys, kRows] in all, in shared memory. Then each warp
//   takes subtiles of 16 kSumTiles queries and kSumColumns columns, computes its part of
//     dQ~ += dS K                             [kRows, d]
//   over all keys of the thread block, and adds it to global memory by atomic additions.
//   In global memory dQ~ lies in fragments, as it does in registers: [B, Hq, rows / 16, d / 8][128]. One addition of a
//   warp therefore covers 512 contiguous bytes. The kernel convert_dq then turns the sums into dQ: a thread block
//   takes kRows queries of a head, each of its 4 warps 16 of them, with dQ~ of grouped attention in shared memory.
#pragma once

#include "cuda/sm80/backward_epilogue.cuh"
#include "cuda/sm80/backward_tile.cuh"

namespace distr::cuda::sm80 {

// Where the sums of a head begin for the rows from `row` on. `row` is a multiple of 16.
template <class C>
[[nodiscard]] __device__ inline float* dq_accum_of(const BackwardParameters& p, int batch, int head, int row) {
  return p.dq_accum + ((batch * p.problem.heads_q + head) * p.stats_rows + row) * C::kDim;
}

// Adds the four sums of a lane to a fragment. Before sm_90 an atomic addition takes one float, so there the fragment is
// laid out such that neighbouring lanes add to neighbouring floats.
__device__ inline void add_fragment(float* fragment, int lane, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::red_add_4(fragment + lane * 4, x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::red_add(fragment + i * 32 + lane, x[i]);
  }
#endif
}
__device__ inline void load_fragment(const float* fragment, int lane, float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const float4 all = *reinterpret_cast<const float4*>(fragment + lane * 4);
  x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = fragment[i * 32 + lane];
  }
#endif
}

// Stores dS^T of this warp's keys and the tile's 16 queries from `row` on in shared memory, whose storage begins at
// `base`. `left` counts the keys from the thread block's first one to the last that exists. K is 0 behind that key, but
// P is 2^-LSE there and may be infinite, so dS is set to 0.
template <class C>
__device__ __forceinline__ void store_ds(std::uint32_t base, int row, int left,
                                         const std::uint32_t (&ds)[C::kKeyTiles][4]) {
  constexpr std::uint32_t kDs = offsetof(typename C::Storage::MainLoop, d_s);
  const int thread = static_cast<int>(ptx::opaque(threadIdx.x));
  const int key = thread / 32 * 16 * C::kKeyTiles + thread % 32 / 4;
  const std::uint32_t start = Tile<C::kRows>{base + kDs}.at(key, 0) + static_cast<std::uint32_t>(thread % 4) * 4;
#pragma unroll
  for (int m = 0; m < C::kKeyTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // `start` lies in chunk 0, so move() may go an odd number of chunks
      const int keys = m * 16 + i % 2 * 8;
      ptx::store_shared_4(Tile<C::kRows>::move(start, keys, row / kChunk + i / 2), key + keys < left ? ds[m][i] : 0);
    }
  }
}

// Adds this thread block's share to dQ~ of the tile of queries from `first` on. `part` selects the columns.
template <class C>
__device__ __forceinline__ void accumulate_dq(const BackwardParameters& p, std::uint32_t base, int batch, int head,
                                              int first, int part) {
  constexpr int kAcross = C::kColumns / C::kSumColumns;  // subtiles in a row of subtiles
  constexpr int kSubtiles = C::kRows / (16 * C::kSumTiles) * kAcross;
  static_assert(kSubtiles % C::kWarps == 0);
  const int thread = static_cast<int>(ptx::opaque(threadIdx.x));
  const int lane = thread % 32;
  constexpr std::uint32_t kDs = offsetof(typename C::Storage::MainLoop, d_s);
  const std::uint32_t ds = Tile<C::kRows>{base + kDs}.at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const std::uint32_t k = Tile<C::kDim>{base}.at(lane % 16, lane / 16);
  int subtile = thread / 32;
#pragma unroll 1
  do {
    const int row = subtile / kAcross * 16 * C::kSumTiles;
    const int chunk = (part * C::kColumns + subtile % kAcross * C::kSumColumns) / kChunk;
    float d_q[C::kSumTiles][C::kSumColumns / 8][4] = {};
#pragma unroll
    for (int key = 0; key < C::kKeys; key += 16) {
      std::uint32_t a[C::kSumTiles][4];
#pragma unroll
      for (int m = 0; m < C::kSumTiles; ++m) {
        ptx::ldmatrix_x4_trans(a[m], Tile<C::kRows>::move(ds, key, row / kChunk + m * 2));
      }
      accumulate_rows<typename C::Element, C::kDim>(d_q, a, Tile<C::kDim>::move(k, key, chunk));
    }
    float* const to = dq_accum_of<C>(p, batch, head, first + row) + chunk * 128;
#pragma unroll
    for (int m = 0; m < C::kSumTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kSumColumns / 8; ++n) {
        add_fragment(to + m * 16 * C::kDim + n * 128, lane, d_q[m][n]);
      }
    }
    subtile += C::kWarps;
  } while (kSubtiles > C::kWarps && subtile < kSubtiles);  // the first condition lets the compiler drop the loop
}

// Writes dQ of kRows queries of a head from the sums.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm) convert_dq(const __grid_constant__ BackwardParameters p) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& storage = *reinterpret_cast<typename C::Storage*>(shared);
  static_assert(sizeof(storage) <= kMaxSharedBytes);
  const auto tiles = static_cast<unsigned>((p.problem.seq_q + C::kRows - 1) / C::kRows);
  const TileCoord coord =
      TileCoord::of(blockIdx.x, static_cast<int>(p.problem.heads_q), p.problem.batch, tiles, p.interleaved);
  const int row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float* const from = dq_accum_of<C>(p, coord.batch, coord.head, coord.tile * C::kRows + row);
  float d_q[C::kRowTiles][C::kDim / 8][4];
#pragma unroll
  for (int n = 0; n < C::kDim / 8; ++n) {
    load_fragment(from + n * 128, lane, d_q[0][n]);
  }
  store_dq<C>(p, coord, row, storage, d_q);
}

}  // namespace distr::cuda::sm80
