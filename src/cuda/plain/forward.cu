// SPDX-License-Identifier: Apache-2.0
// The plain forward: O = softmax(scale q_hat k_hat^T + mask) V and LSE (paper, Equation 2 and Section 3.3) by online
// softmax, tile by tile, in fp32.
//
// A block of 16 x 16 threads takes up to 64 rows of one block of Q (one order) and up to 128 columns of V; wider V is
// shared by blocks along grid.y, each of which computes the scores anew. Thread (y, x) keeps rows 4 y .. 4 y + 3: their
// maximum and sum (16 threads hold the same), scores of 4 keys, and 8 columns of O, all in registers.
//
// For every tile of 64 keys:
//   S = q_hat k_hat^T, 32 groups at a time: both are gathered from global memory, fused, and staged transposed,
//   maximum, sum and P by online softmax in natural units: the scale is rounded once, as in a plain implementation;
//   O shrinks by e^(old maximum - new one), and gains P V, 32 keys of V at a time.
// Shared memory: q_hat and k_hat [32][68] twice, in turn with V [32][128]; P^T [64][68]; the order [512].
#include "cuda/launch.h"
#include "cuda/plain/plain.h"
#include "cuda/plain/tile.cuh"

namespace distr::cuda::plain {
namespace {

struct ForwardArguments {
  DeviceProblem problem;
  std::int64_t tiles;  // of a block
  float scale;
  const void* q;              // [batch, heads_q, seq_q, d]
  const void* k;              // [batch, heads_kv, seq_k, d]
  const void* v;              // [batch, heads_kv, seq_k, dv]
  const std::int32_t* order;  // [batch, heads_q, blocks, d]
  void* o;                    // [batch, heads_q, seq_q, dv]
  float* lse;                 // [batch, heads_q, seq_q], or null
};

struct alignas(16) ForwardShared {
  union {
    Staged staged;
    float v[kStagedRows * kColumns];
  };
  float p[kSide * kPitch];  // P^T [key][row]
  std::int32_t order[kMaxHeadDim];
};
static_assert(sizeof(ForwardShared) <= 48 * 1024);

// What the tiles so far say of this thread's rows.
struct RowState {
  float maximum[4] = {kHidden, kHidden, kHidden, kHidden};
  float sum[4] = {};
  float o[4][8] = {};  // columns column_of(0) .. column_of(7)
};

// The 16 threads of a row agree on the result.
__device__ float row_maximum(float x) {
  for (int step = 8; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, step));
  }
  return x;
}

__device__ float row_sum(float x) {
  for (int step = 8; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xFFFFFFFFU, x, step);
  }
  return x;
}

// r_s becomes P relative to the rows' new maximum, which also goes to shared.p.
__device__ void online_softmax(float (&r_s)[4][4], RowState& rows, ForwardShared& shared) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  const int x = static_cast<int>(threadIdx.x) % 16;
  for (int row = 0; row < 4; ++row) {
    const float tile_maximum = fmaxf(fmaxf(r_s[row][0], r_s[row][1]), fmaxf(r_s[row][2], r_s[row][3]));
    const float maximum = fmaxf(rows.maximum[row], row_maximum(tile_maximum));
    // Where every key is hidden so far, e^(-inf - 0) = 0 is wanted, not e^(-inf + inf).
    const float shift = maximum == kHidden ? 0.0F : maximum;
    const float shrink = expf(rows.maximum[row] - shift);
    float sum = 0;
    for (int key = 0; key < 4; ++key) {
      r_s[row][key] = expf(r_s[row][key] - shift);
      sum += r_s[row][key];
    }
    rows.maximum[row] = maximum;
    rows.sum[row] = rows.sum[row] * shrink + row_sum(sum);
    for (float& value : rows.o[row]) {
      value = shrink == 0 ? 0 : value * shrink;  // forgets an infinity, too
    }
  }
  for (int key = 0; key < 4; ++key) {
    *reinterpret_cast<float4*>(shared.p + (4 * x + key) * kPitch + 4 * y) =
        make_float4(r_s[0][key], r_s[1][key], r_s[2][key], r_s[3][key]);
  }
}

template <class T>
__device__ void store(const ForwardArguments& arguments, const Tile& tile, int first_column, int columns,
                      const RowState& rows) {
  const DeviceProblem& problem = arguments.problem;
  const int y = static_cast<int>(threadIdx.x) / 16;
  const int x = static_cast<int>(threadIdx.x) % 16;
  for (int row = 0; row < 4; ++row) {
    if (4 * y + row >= tile.rows) {
      break;
    }
    const std::int64_t i = tile.first + 4 * y + row;
    const bool hidden = rows.sum[row] == 0;
    T* o = static_cast<T*>(arguments.o) + tile.b * problem.o.batch + tile.h * problem.o.head + i * problem.o.row +
           first_column;
    for (int n = 0; n < 8; ++n) {
      const int column = column_of(n);
      if (column < columns) {
        o[column] = from_float<T>(hidden ? 0.0F : rows.o[row][n] / rows.sum[row]);
      }
    }
    if (arguments.lse != nullptr && first_column == 0 && x == 0) {
      arguments.lse[(tile.b * problem.heads_q + tile.h) * problem.seq_q + i] =
          hidden ? kHidden : rows.maximum[row] + logf(rows.sum[row]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  __shared__ ForwardShared shared;
  const DeviceProblem& problem = arguments.problem;
  const Tile tile = find_tile(problem, arguments.tiles, blockIdx.x);
  if (tile.rows <= 0) {
    return;
  }
  const TileGroups groups = load_groups(problem, tile, arguments.order, shared.order);
  const int first_column = static_cast<int>(blockIdx.y) * kColumns;
  const int columns = min(kColumns, problem.head_dim_v - first_column);
  const T* q = static_cast<const T*>(arguments.q) + tile.b * problem.q.batch + tile.h * problem.q.head +
               tile.first * problem.q.row;
  const T* k = static_cast<const T*>(arguments.k) + tile.b * problem.k.batch + tile.h_kv * problem.k.head;
  const T* v =
      static_cast<const T*>(arguments.v) + tile.b * problem.v.batch + tile.h_kv * problem.v.head + first_column;
  const std::int64_t keys = visible_keys(problem, tile.first + tile.rows - 1);
  RowState rows;
  for (std::int64_t first_key = 0; first_key < keys; first_key += kSide) {
    float r_s[4][4];
    compute_scores(problem, arguments.scale, tile, groups, q, k + first_key * problem.k.row, first_key, shared.staged,
                   r_s);
    online_softmax(r_s, rows, shared);
    for (int staged = 0; staged < kSide; staged += kStagedRows) {
      const std::int64_t first = first_key + staged;
      __syncthreads();
      const bool finite = stage_wide(problem.seq_k - first, columns, true, shared.v, [&](int key, int column) {
        return to_float(v[(first + key) * problem.v.row + column]);
      });
      accumulate(shared.p + staged * kPitch, shared.v, columns, finite, 0, rows.o);
    }
  }
  store<T>(arguments, tile, first_column, columns, rows);
}

}  // namespace

KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping,
                                        const Execution& /*execution*/) {
  ForwardArguments arguments{};
  arguments.problem = tiled_problem(problem, grouping);
  arguments.tiles = tiles_of_block(arguments.problem);
  arguments.scale = static_cast<float>(problem.softmax_scale());
  const dim3 grid(static_cast<unsigned>(num_tiles(arguments.problem)),
                  static_cast<unsigned>(common::ceil_div(problem.head_dim_v, kColumns)));
  KernelPlan<ForwardTensors> result;
  result.tiles = {{kSide, kSide, problem.head_dim, arguments.problem.groups}};
  result.launches = {{result.tiles.front(), std::int64_t{grid.x} * grid.y, kThreads, 0}};
  result.run = [dtype = problem.dtype, arguments, grid](const ForwardTensors& tensors, const Execution& execution) {
    ForwardArguments with = arguments;
    with.problem.mask.data = tensors.mask;
    with.q = tensors.q;
    with.k = tensors.k;
    with.v = tensors.v;
    with.order = tensors.order;
    with.o = tensors.o;
    with.lse = static_cast<float*>(tensors.lse);
    with_element(dtype, [&]<class T>(std::type_identity<T>) {
      launch(forward_kernel<T>, grid, kThreads, 0, execution.stream, with);
    });
  };
  return result;
}

}  // namespace distr::cuda::plain
