// SPDX-License-Identifier: Apache-2.0
// The plain backward (method, 3), the order held constant, in fp32 and with every sum in a fixed order:
//   D = rowsum(dO * O) - dLSE    P = e^(S - LSE)    dP = dO V^T    dS = P * (dP - D), times the slope of a cap
//   dq_hat = scale dS k_hat      dK = scale sum over blocks of dS^T Q~      dV = P^T dO
// where Q~ is q_hat spread over the d columns. dQ of a column is dq_hat of its group, or its share of it.
//
// Four kernels, of 16 x 16 threads each, that compute the scores of a tile anew as the forward does:
//   delta: D, one warp a row;
//   dQ: a block owns up to 64 rows of one block of Q and 128 groups (grid.y), with near keys 128 columns
//     (backward_near.cuh), and meets all keys;
//   dK: a block owns 64 keys of a KV head and 128 columns, and meets all tiles of the queries of its heads, in order;
//   dV: likewise.
// Thread (y, x) keeps a 4 x 8 piece of the sum in registers. Shared memory: the staged factors (Staged), in turn with
// the wide one [32][128]; P or dS [64][68]; the order and, for dK, each column's group [512].
// The gradient of a mask is in mask_gradient.cu.
#include <algorithm>

#include "common/gradient_strides.h"
#include "common/sequence.h"
#include "cuda/launch.h"
#include "cuda/mask_gradient.h"
#include "cuda/plain/backward_near.cuh"
#include "cuda/plain/plain.h"
#include "cuda/workspace.h"

namespace distr::cuda::plain {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr std::int64_t kMaxDeltaBlocks = 1 << 20;  // more rows than these have warps are taken in turns

template <class T>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr int kWarp = 32;
  const DeviceProblem& problem = arguments.problem;
  const std::int64_t rows = problem.batch * problem.heads_q * problem.seq_q;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp; row < rows;
       row += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t head = row / problem.seq_q;
    const auto at = [&](const void* data) {
      return rows_at<T>(data, problem.o, head / problem.heads_q, head % problem.heads_q, row % problem.seq_q);
    };
    const T* o = at(arguments.o);
    const T* d_o = at(arguments.d_o);
    float sum = 0;
    for (int c = static_cast<int>(threadIdx.x) % kWarp; c < problem.head_dim_v; c += kWarp) {
      sum = fmaf(to_float(d_o[c]), to_float(o[c]), sum);
    }
    for (int lane = kWarp / 2; lane > 0; lane /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, lane);
    }
    if (threadIdx.x % kWarp == 0) {
      arguments.delta[row] = sum - (arguments.d_lse == nullptr ? 0.0F : arguments.d_lse[row]);
    }
  }
}

__device__ void store_as_it_is(const float (&r_s)[4][4], float* s_weights) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  const int x = static_cast<int>(threadIdx.x) % 16;
  for (int row = 0; row < 4; ++row) {
    *reinterpret_cast<float4*>(s_weights + (4 * y + row) * kPitch + 4 * x) =
        make_float4(r_s[row][0], r_s[row][1], r_s[row][2], r_s[row][3]);
  }
}

// dQ of the columns of this thread's groups, from dq_hat without the scale; 0 for columns that nothing was taken from.
template <class T>
__device__ void spread_dq(const BackwardArguments& arguments, const Tile& tile, const TileGroups& groups,
                          int first_group, const float (&r_dq)[4][8]) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  T* d_q = rows_at<T>(arguments.d_q, arguments.d_q_strides, tile.b, tile.h, tile.first);
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    T* to = d_q + (4 * y + row) * arguments.d_q_strides.row;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int g = first_group + column_of(n);
      const int size = g < groups.count && 4 * y + row < tile.rows ? groups.size(g) : 0;
      const float whole = arguments.scale * r_dq[row][n];
#pragma unroll 1  // as in sum_members()
      for (int member = 0; member < size; ++member) {
        const float share = arguments.problem.mean ? whole / static_cast<float>(size) : member == 0 ? whole : 0.0F;
        to[groups.column(g, member)] = from_float<T>(share);
      }
    }
  }
  // What `energy` drops.
  const int kept = groups.count * groups.members;
  const int dropped = first_group == 0 ? max(groups.columns - kept, 0) : 0;
  for (int n = static_cast<int>(threadIdx.x); n < dropped * static_cast<int>(tile.rows); n += kThreads) {
    d_q[n / dropped * arguments.d_q_strides.row + groups.order[kept + n % dropped]] = from_float<T>(0);
  }
}

// What the thread block `index` does.
template <class T>
__device__ __forceinline__ void compute_dq(const BackwardArguments& arguments, std::int64_t index,
                                           BackwardShared& shared) {
  const DeviceProblem& problem = arguments.problem;
  const Tile tile = find_tile(problem, arguments.tiles, index);
  if (tile.rows <= 0) {
    return;
  }
  const TileGroups groups = load_groups(problem, tile, arguments.order, shared.order);
  const int first_group = static_cast<int>(blockIdx.y) * kColumns;
  const int columns = min(kColumns, groups.count - first_group);
  if (columns <= 0) {
    return;
  }
  const T* k = rows_at<T>(arguments.k, problem.k, tile.b, tile.h_kv, 0);
  const SeenKeys keys = seen_keys(problem, tile);
  float r_dq[4][8] = {};
  for (std::int64_t first_key = keys.first; first_key < keys.end; first_key += kSide) {
    float r_s[4][4];
    compute_score_gradients<T, Means::none>(arguments, tile, groups, first_key, Slope::included, shared.staged, r_s);
    store_transposed(r_s, shared.weights);
    for (int staged = 0; staged < kSide; staged += kStagedRows) {
      const std::int64_t first = first_key + staged;
      __syncthreads();
      const bool finite = stage_wide(problem.seq_k - first, columns, true, shared.wide, [&](int key, int column) {
        const int g = first_group + column;
        return sum_members(groups, k + (first + key) * problem.k.row, g, groups.size(g));
      });
      accumulate(shared.weights + staged * kPitch, shared.wide, columns, finite, 0, r_dq);
    }
  }
  spread_dq<T>(arguments, tile, groups, first_group, r_dq);
}

template <class T>
__global__ void __launch_bounds__(kThreads) dq_kernel(const __grid_constant__ BackwardArguments arguments) {
  __shared__ BackwardShared shared;
  compute_dq<T>(arguments, blockIdx.x, shared);
}

// The keys and columns that a block of dK or dV owns.
struct Owned {
  std::int64_t b, h_kv, first_key;
  int first_column;
};

__device__ Owned find_owned(const BackwardArguments& arguments, std::int64_t index) {
  const std::int64_t heads = arguments.problem.heads_kv;
  const std::int64_t head = index / arguments.key_tiles;
  return {head / heads, head % heads, index % arguments.key_tiles * kSide, static_cast<int>(blockIdx.y) * kColumns};
}

// Calls visit(tile) for every tile of queries that reads the owned keys, in order.
template <class Visit>
__device__ void for_each_tile(const BackwardArguments& arguments, const Owned& owned, const Visit& visit) {
  const DeviceProblem& problem = arguments.problem;
  const std::int64_t heads = problem.heads_q / problem.heads_kv;
  const std::int64_t first_head = owned.b * problem.heads_q + owned.h_kv * heads;
  for (std::int64_t n = 0; n < heads * arguments.tiles_of_head; ++n) {
    const Tile tile = find_tile(problem, arguments.tiles, first_head * arguments.tiles_of_head + n);
    if (tile.rows > 0 && seen_keys(problem, tile).has(owned.first_key)) {
      visit(at_keys(problem, tile, owned.first_key));
    }
  }
}

template <class T>
__device__ void store_owned(const DeviceProblem& problem, const Owned& owned, T* to, std::int64_t stride, int columns,
                            float factor, const float (&r_sum)[4][8]) {
  const int y = static_cast<int>(threadIdx.x) / 16;
  for (int key = 0; key < 4 && owned.first_key + 4 * y + key < problem.seq_k; ++key) {
    for (int n = 0; n < 8; ++n) {
      if (column_of(n) < columns) {
        to[(4 * y + key) * stride + owned.first_column + column_of(n)] = from_float<T>(factor * r_sum[key][n]);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void compute_dv(const BackwardArguments& arguments, std::int64_t index,
                                           BackwardShared& shared) {
  const DeviceProblem& problem = arguments.problem;
  const Owned owned = find_owned(arguments, index);
  const int columns = min(kColumns, problem.head_dim_v - owned.first_column);
  float r_dv[4][8] = {};
  for_each_tile(arguments, owned, [&](const Tile& tile) {
    const TileGroups groups = load_groups(problem, tile, arguments.order, shared.order);
    const T* d_o = rows_at<T>(arguments.d_o, problem.o, tile.b, tile.h, tile.first) + owned.first_column;
    float r_p[4][4];
    compute_probabilities<T>(arguments, tile, groups, owned.first_key, Slope::none, shared.staged, r_p);
    store_as_it_is(r_p, shared.weights);
    for (int staged = 0; staged < kSide; staged += kStagedRows) {
      __syncthreads();
      const bool finite = stage_wide(tile.rows - staged, columns, true, shared.wide, [&](int row, int column) {
        return to_float(d_o[(staged + row) * problem.o.row + column]);
      });
      accumulate(shared.weights + staged * kPitch, shared.wide, columns, finite, 0, r_dv);
    }
  });
  const Strides& strides = arguments.d_v_strides;
  store_owned(problem, owned, rows_at<T>(arguments.d_v, strides, owned.b, owned.h_kv, owned.first_key), strides.row,
              columns, 1.0F, r_dv);
}

template <class T>
__global__ void __launch_bounds__(kThreads) dv_kernel(const __grid_constant__ BackwardArguments arguments) {
  __shared__ BackwardShared shared;
  compute_dv<T>(arguments, blockIdx.x, shared);
}

// Q~ of a row: what q_hat has for group g; 0 if the group was dropped.
template <class T>
__device__ float spread_q(const TileGroups& groups, bool mean, const T* row, int g) {
  const int members = g >= groups.count ? 0 : mean ? groups.size(g) : 1;
  const float sum = sum_members(groups, row, g, members);
  return members > 1 ? sum / static_cast<float>(members) : sum;
}

template <class T>
__device__ __forceinline__ void compute_dk(const BackwardArguments& arguments, std::int64_t index,
                                           BackwardShared& shared) {
  const DeviceProblem& problem = arguments.problem;
  const Owned owned = find_owned(arguments, index);
  const int columns = min(kColumns, problem.head_dim - owned.first_column);
  float r_dk[4][8] = {};
  for_each_tile(arguments, owned, [&](const Tile& tile) {
    const TileGroups groups = load_groups(problem, tile, arguments.order, shared.order);
    for (int n = static_cast<int>(threadIdx.x); n < groups.columns; n += kThreads) {
      shared.group[shared.order[n]] = n / groups.members;
    }
    const T* q = rows_at<T>(arguments.q, problem.q, tile.b, tile.h, tile.first);
    float r_s[4][4];
    compute_score_gradients<T>(arguments, tile, groups, owned.first_key, Slope::included, shared.staged, r_s);
    store_as_it_is(r_s, shared.weights);
    bool finite_s = true;
    for (int element = 0; element < 16; ++element) {
      finite_s = finite_s && isfinite(r_s[element / 4][element % 4]);
    }
    unsigned unused = 0;  // of this thread's columns: dropped ones
    for (int n = 0; n < 8; ++n) {
      const int c = owned.first_column + column_of(n);
      unused |= (c < problem.head_dim && shared.group[c] >= groups.count ? 1U : 0U) << n;
    }
    for (int staged = 0; staged < kSide; staged += kStagedRows) {
      __syncthreads();
      const bool finite = stage_wide(tile.rows - staged, columns, finite_s, shared.wide, [&](int row, int column) {
        return spread_q(groups, problem.mean, q + (staged + row) * problem.q.row,
                        shared.group[owned.first_column + column]);
      });
      accumulate(shared.weights + staged * kPitch, shared.wide, columns, finite, unused, r_dk);
    }
  });
  const Strides& strides = arguments.d_k_strides;
  store_owned(problem, owned, rows_at<T>(arguments.d_k, strides, owned.b, owned.h_kv, owned.first_key), strides.row,
              columns, arguments.scale, r_dk);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) dk_kernel(const __grid_constant__ BackwardArguments arguments) {
  __shared__ BackwardShared shared;
  compute_dk<T>(arguments, blockIdx.x, shared);
}

// The same of packed sequences (cuda/sequence.cuh).
enum class Gradient : std::uint8_t { dq, dk, dv };

template <class T, Gradient kOf>
__global__ void __launch_bounds__(kThreads, 1) sequences_kernel(const __grid_constant__ BackwardArguments launched) {
  __shared__ BackwardShared shared;
  __shared__ OwnParameters<BackwardArguments> own;
  const DeviceProblem& problem = launched.problem;
  const std::int64_t blocks = kOf == Gradient::dq ? problem.heads_q * launched.tiles_of_head
                                                  : problem.heads_kv * launched.key_tiles;  // of an entry
  const BackwardArguments& arguments =
      own.make(launched, [&](BackwardArguments& of_entry) { enter<T>(of_entry, blockIdx.x / blocks); });
  const std::int64_t index = blockIdx.x % blocks;
  if constexpr (kOf == Gradient::dq) {
    compute_dq<T>(arguments, index, shared);
  } else if (find_owned(arguments, index).first_key < arguments.problem.seq_k) {
    kOf == Gradient::dk ? compute_dk<T>(arguments, index, shared) : compute_dv<T>(arguments, index, shared);
  }
}

BackwardArguments arguments_of(const Problem& problem, const Grouping& grouping) {
  BackwardArguments result{};
  result.problem = tiled_problem(problem, grouping);
  result.tiles = tiles_of_block(result.problem);
  result.tiles_of_head = result.problem.blocks * result.tiles;
  result.scale = static_cast<float>(problem.softmax_scale());
  result.lengths = DeviceLengths(problem);
  result.lse_stride = lse_stride(result.lengths, result.problem);
  result.key_tiles = common::ceil_div(problem.seq_k, kSide);
  result.d_q_strides = common::gradient_strides(problem).q;
  result.d_k_strides = common::gradient_strides(problem).k;
  result.d_v_strides = common::gradient_strides(problem).v;
  return result;
}

// D is of all rows alike.
BackwardArguments with_all_rows(BackwardArguments arguments) {
  if (arguments.lengths.packed) {
    arguments.problem.batch = 1;
    arguments.problem.seq_q = arguments.lengths.total_q;
  }
  return arguments;
}

BackwardArguments with_tensors(BackwardArguments arguments, const BackwardTensors& tensors, float* delta) {
  arguments.problem.mask.data = tensors.mask;
  arguments.q = tensors.q;
  arguments.k = tensors.k;
  arguments.v = tensors.v;
  arguments.order = tensors.order;
  arguments.key_means = tensors.key_means;
  arguments.o = tensors.o;
  arguments.lse = static_cast<const float*>(tensors.lse);
  arguments.d_o = tensors.d_o;
  arguments.d_lse = static_cast<const float*>(tensors.d_lse);
  arguments.delta = delta;
  arguments.d_q = tensors.d_q;
  arguments.d_k = tensors.d_k;
  arguments.d_v = tensors.d_v;
  arguments.lengths.of = tensors.lengths;
  return arguments;
}

// The kernels of one operation, each unless it has nothing to write: how many thread blocks own rows or keys, and how
// many columns there are.
struct Work {
  std::int64_t delta_blocks, query_tiles, key_tiles, groups, head_dim, head_dim_v;

  Work(const DeviceProblem& problem, std::int64_t rows)
      : delta_blocks(std::min(common::ceil_div(rows, kWarps), kMaxDeltaBlocks)),
        query_tiles(delta_blocks == 0 ? 0 : num_tiles(problem)),
        key_tiles(problem.batch * problem.heads_kv * common::ceil_div(problem.seq_k, kSide)),
        // Rows that attend exactly have a group for each column, and so have near keys.
        groups(problem.first_block_is_exact || problem.near.has ? problem.head_dim : problem.groups),
        head_dim(problem.head_dim),
        head_dim_v(problem.head_dim_v) {}

  [[nodiscard]] static dim3 grid(std::int64_t blocks, std::int64_t columns) {
    return {static_cast<unsigned>(blocks), static_cast<unsigned>(common::ceil_div(columns, kColumns))};
  }
};

template <class T>
void launch_all(const BackwardArguments& arguments, const Work& work, void* stream) {
  const auto run = [&](auto kernel, std::int64_t blocks, std::int64_t columns, const BackwardArguments& with) {
    if (blocks > 0) {
      launch(kernel, Work::grid(blocks, columns), kThreads, 0, stream, with);
    }
  };
  const bool packed = arguments.lengths.packed;
  run(delta_kernel<T>, work.delta_blocks, 1, with_all_rows(arguments));
  run(arguments.problem.near.has ? near_dq_kernel<T>
      : packed                   ? sequences_kernel<T, Gradient::dq>
                                 : dq_kernel<T>,
      work.query_tiles, work.groups, arguments);
  run(packed ? sequences_kernel<T, Gradient::dk> : dk_kernel<T>, work.key_tiles, work.head_dim, arguments);
  run(packed ? sequences_kernel<T, Gradient::dv> : dv_kernel<T>, work.key_tiles, work.head_dim_v, arguments);
}

}  // namespace

KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping,
                                          const Execution& /*execution*/) {
  KernelPlan<BackwardTensors> result;
  const BackwardArguments arguments = arguments_of(problem, grouping);
  const std::int64_t rows = common::count_rows(problem);
  const Work work(arguments.problem, rows);
  const MaskGradient mask_gradient(problem, grouping);
  const Part<float> delta(result.workspace, "D", rows);
  const TileShape tile{kSide, kSide, problem.head_dim, arguments.problem.groups};
  const auto shape = [&](std::int64_t blocks, std::int64_t columns) {
    const dim3 grid = Work::grid(blocks, columns);
    return LaunchShape{tile, std::int64_t{grid.x} * grid.y, kThreads, 0};
  };
  result.tiles = {tile};
  result.launches = {shape(work.delta_blocks, 1), shape(work.query_tiles, work.groups),
                     shape(work.key_tiles, work.head_dim), shape(work.key_tiles, work.head_dim_v)};
  result.run = [dtype = problem.dtype, arguments, work, mask_gradient, delta](const BackwardTensors& tensors,
                                                                              const Execution& execution) {
    float* const of_rows = delta.in(execution.workspace);
    const BackwardArguments with = with_tensors(arguments, tensors, of_rows);
    with_element(dtype, [&]<class T>(std::type_identity<T>) { launch_all<T>(with, work, execution.stream); });
    if (tensors.d_mask != nullptr) {
      mask_gradient.write(tensors, of_rows, execution.stream);
    }
  };
  return result;
}

}  // namespace distr::cuda::plain
