// SPDX-License-Identifier: Apache-2.0
// result[row, c] = the sum, over the heads h that share it and over near and far keys, of share(h, c) * sums_h[row,
// group of c in the order of h]:
//   dQ of dq_hat: one head; the group's mean gives each of its columns an equal part, a sampled column gets all
//   dQ of dQ~: the same, and the sums of a group are those of its columns, in the order of the row's block
//   dK of dk_hat: the query heads of a KV head; every column of a group gets all of it
//   dV: the same, of heads whose columns are their own groups
// and dQ of a dropped column takes the mean of its keys times the row's sum of dS over far keys.
//
// A thread block takes 64 rows of a head of the result: the sums of each head that shares it pass through shared
// memory, where a warp takes four rows and a lane those of its columns' groups. Bound by memory, 4 bytes read for an
// element of the sums and 2 written, so a thread keeps few registers and an SM has the loads of two blocks on their
// way.
#include "cuda/sm90/backward_convert.h"

#include "cuda/dependent_launch.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda::sm90 {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kFragmentRows = 16;
constexpr int kLoaders = kWarps / (kConvertedRows / kFragmentRows);  // warps that load a fragment's rows
constexpr int kRows = kConvertedRows / kWarps;                       // of the result, a warp's
constexpr int kMaxColumns = 128;
constexpr int kPitch = kMaxColumns + 8;  // floats of a row in shared memory

// What each column takes: `weight` of the sums at source[first .. first + count - 1].
struct Columns {
  int first[kMaxColumns];
  int count[kMaxColumns];
  float weight[kMaxColumns];
  int source[kMaxColumns];
};

__device__ void find_groups(const Conversion& r, const Sums& sums, std::int64_t head, std::int64_t block, Columns& of) {
  const bool is_exact = sums.order == nullptr || (r.first_block_is_exact && block == 0);
  for (int place = static_cast<int>(threadIdx.x); place < kMaxColumns; place += kThreads) {
    of.source[place] = place;
    if (place >= r.columns || is_exact) {
      of.first[place] = place;
      of.count[place] = place < r.columns ? 1 : 0;
      of.weight[place] = r.scale;
      continue;
    }
    const int group = place / r.members;
    const int size = min(r.members, r.columns - group * r.members);
    const bool takes = group < r.groups && (sums.share != Share::first || place == group * r.members);
    const int column = sums.order[(head * r.blocks + block) * r.columns + place];
    if (sums.spread) {
      of.source[place] = column;
    }
    of.first[column] = sums.spread ? group * r.members : group;
    of.count[column] = !takes ? 0 : sums.spread ? size : 1;
    of.weight[column] = sums.share == Share::mean ? r.scale / static_cast<float>(size) : r.scale;
  }
}

// The weight of a dropped column becomes the mean of its keys, that of any other 0.
__device__ void find_means(const Conversion& r, std::int64_t head, std::int64_t block, Columns& of) {
  const std::int32_t* const order = r.sums[0].order + (head * r.blocks + block) * r.columns;
  const float* const means =
      r.far.means + (head / r.far.heads_per_kv * r.far.count + (r.far.count == 1 ? 0 : block)) * r.columns;
  for (int place = static_cast<int>(threadIdx.x); place < kMaxColumns; place += kThreads) {
    const int column = place < r.columns ? order[place] : place;
    of.weight[column] = place >= r.groups * r.members && place < r.columns ? r.scale * means[column] : 0.0F;
  }
}

// The sums of a tile of kConvertedRows rows.
[[nodiscard]] __device__ const float* of_tile(const Conversion& r, const Sums& sums, std::int64_t head,
                                              std::int64_t tile) {
  return sums.data + (head * r.padded_rows + tile * kConvertedRows) * (sums.columns + sums.has_ds_sums);
}

// A row's sum of dS over far keys.
[[nodiscard]] __device__ float far_ds_sum(const Conversion& r, std::int64_t head, std::int64_t tile, int row) {
  const FarRow of = r.far.of_row[head * r.rows + tile * kConvertedRows + row];
  return of.has_far ? of.ds_sum - of_tile(r, r.sums[1], head, tile)[kConvertedRows * r.sums[1].columns + row] : 0.0F;
}

[[nodiscard]] __host__ __device__ std::int64_t tiles_of_head(const Conversion& r) {
  return r.packed.lengths.packed ? r.padded_rows / kConvertedRows : (r.rows + kConvertedRows - 1) / kConvertedRows;
}

// The rows of the result that a thread block's tile of sums is of.
struct ResultRows {
  std::int64_t first;  // of their sequence, in the result
  std::int64_t begin;  // the tile's first, counted from there
  std::int64_t end;
  std::int64_t first_sum, end_sum;  // there are no sums of those outside
};

// tile: of kConvertedRows of a head.
__device__ ResultRows rows_of(const Conversion& r, std::int64_t tile) {
  const PackedResult& packed = r.packed;
  const DeviceLengths& lengths = packed.lengths;
  if (!lengths.packed) {
    return {0, tile * kConvertedRows, r.rows, r.first_row, r.end_row};
  }
  constexpr int kTiles = kPaddedRows / kConvertedRows;
  const PackedTile of =
      find_packed_tile(packed.of_keys ? lengths.of.starts_k : lengths.of.starts_q,
                       static_cast<int>(packed.problem.batch), static_cast<int>(tile / kTiles), kPaddedRows);
  const DeviceSequence sequence(packed.problem, lengths, of.sequence);
  const std::int64_t begin = std::int64_t{of.number} * kPaddedRows + tile % kTiles * kConvertedRows;
  if (packed.of_keys) {
    return {sequence.first_key, begin, sequence.keys, 0, sequence.keys};
  }
  const VisibleRows visible = visible_rows(packed.problem, lengths, sequence);
  return {sequence.first_row, begin, sequence.rows, std::int64_t{first_query_tile(visible, 0)} * kQueryTileRows,
          sequence.keys == 0 ? 0 : std::int64_t{end_query_tile(visible, sequence.keys)} * kQueryTileRows};
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) convert_kernel(const __grid_constant__ Conversion r) {
  __shared__ float s_sums[kConvertedRows][kPitch];
  __shared__ Columns s_columns;
  launch_dependent_grids();
  wait_on_dependent_grids();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto tiles = static_cast<unsigned>(tiles_of_head(r));
  const auto to_heads = static_cast<unsigned>(r.heads / r.heads_per_result);
  const unsigned to_head = blockIdx.x / tiles;  // of all batches
  const unsigned tile = blockIdx.x % tiles;
  const unsigned batch = to_head / to_heads;
  const unsigned head_of_batch = to_head % to_heads;
  const ResultRows rows = rows_of(r, tile);
  if (rows.begin < 0 || rows.begin >= rows.end) {  // where sequences leave room between them
    return;
  }
  const int fragment_row = warp / kLoaders * kFragmentRows;
  const std::int64_t fragment = rows.begin + fragment_row;
  const bool has_sums = fragment >= rows.first_sum && fragment < rows.end_sum;
  const std::int64_t row = rows.begin + warp * kRows;
  // A single block may have any length, one of several has less than the rows.
  const std::int64_t block = r.blocks == 1 ? 0 : static_cast<unsigned>(rows.begin) / static_cast<unsigned>(r.block);

  float total[kRows][4] = {};  // of this lane's columns: 2 lane, its neighbour, and those 64 behind
  const auto column = [&](int i) { return i / 2 * 64 + lane * 2 + i % 2; };
  const auto add = [&](const Sums& of_keys, std::int64_t head) {
    __syncthreads();  // nobody reads the columns of the sums before any more
    const float* const from = of_tile(r, of_keys, head, tile) + std::int64_t{fragment_row} * of_keys.columns;
#pragma unroll
    for (int i = 0; i < kMaxColumns / 8 / kLoaders; ++i) {  // loads on their way at the same time
      const int n = i * kLoaders + warp % kLoaders;
      float4 x = make_float4(0, 0, 0, 0);
      if (has_sums && n < of_keys.columns / 8) {
        x = *reinterpret_cast<const float4*>(from + n * kFragment + lane * 4);
      }
      float* const to = &s_sums[fragment_row + lane / 4][n * 8 + lane % 4 * 2];
      *reinterpret_cast<float2*>(to) = make_float2(x.x, x.y);
      *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(x.z, x.w);
    }
    find_groups(r, of_keys, head, block, s_columns);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int* const sources = s_columns.source + s_columns.first[column(i)];
      const float weight = s_columns.weight[column(i)];
      for (int n = 0; n < s_columns.count[column(i)]; ++n) {
        const int source = sources[n];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          total[k][i] += weight * s_sums[warp * kRows + k][source];
        }
      }
    }
  };
  for (std::int64_t h = 0; h < r.heads_per_result; ++h) {
    const std::int64_t head = batch * r.heads + head_of_batch * r.heads_per_result + h;
    for (const Sums& of_keys : r.sums) {
      if (of_keys.data != nullptr) {
        add(of_keys, head);
      }
    }
  }
  if (r.far.of_row != nullptr && !(r.first_block_is_exact && block == 0)) {
    __syncthreads();
    find_means(r, to_head, block, s_columns);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const float far = row + k < r.rows ? far_ds_sum(r, to_head, tile, warp * kRows + k) : 0.0F;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A far sum that is not finite is none of a column that keeps no mean.
        const float mean = s_columns.weight[column(i)];
        total[k][i] += mean == 0 ? 0.0F : mean * far;
      }
    }
  }

  T* const base = static_cast<T*>(r.to) + batch * r.strides.batch + head_of_batch * r.strides.head;
  const bool pairs = reinterpret_cast<std::uintptr_t>(base) % 4 == 0 && r.strides.row % 2 == 0;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (row + k >= rows.end) {
      break;
    }
    T* const line = base + (rows.first + row + k) * r.strides.row;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      store_pair(line, column(i), r.columns, pairs, total[k][i], total[k][i + 1]);
    }
  }
}

}  // namespace

void convert_sums(const Conversion& conversion, void* stream) {
  const std::int64_t blocks =
      conversion.batch * (conversion.heads / conversion.heads_per_result) * tiles_of_head(conversion);
  launch_dependent(conversion.dtype == DType::f16 ? convert_kernel<__half> : convert_kernel<__nv_bfloat16>,
                   dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, conversion);
}

}  // namespace distr::cuda::sm90
