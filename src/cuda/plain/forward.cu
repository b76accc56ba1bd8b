// SPDX-License-Identifier: Apache-2.0
// The plain forward: O = softmax(cap(scale q_hat k_hat^T) + mask) V and LSE (paper, Equation 2 and Section 3.3) by
// online softmax, tile by tile, in fp32.
//
// A block of 16 x 16 threads takes up to 64 rows of one block of Q (one order) and up to 128 columns of V; wider V is
// shared by blocks along grid.y, each of which computes the scores anew. Thread (y, x) keeps rows 4 y .. 4 y + 3: their
// maximum and sum (16 threads hold the same), scores of 4 keys, and 8 columns of O, all in registers.
//
// With near keys it is forward_near.cuh's. For every tile of 64 keys that a row sees:
//   S = q_hat k_hat^T, 32 groups at a time: both are gathered from global memory, fused, and staged transposed,
//   maximum, sum and P by online softmax in natural units: the scale is rounded once, as in a plain implementation;
//   O shrinks by e^(old maximum - new one), and gains P V, 32 keys of V at a time.
// Shared memory: q_hat and k_hat [32][68] twice, in turn with V [32][128]; P^T [64][68]; the order [512].
#include "cuda/launch.h"
#include "cuda/plain/forward_near.cuh"
#include "cuda/plain/plain.h"

namespace distr::cuda::plain {
namespace {

template <class T>
__device__ __forceinline__ void attend(const ForwardArguments& arguments, std::int64_t index, ForwardShared& shared) {
  const DeviceProblem& problem = arguments.problem;
  const Tile tile = find_tile(problem, arguments.tiles, index);
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
  const SeenKeys keys = seen_keys(problem, tile);
  RowState rows;
  for (std::int64_t first_key = keys.first; first_key < keys.end; first_key += kSide) {
    float r_s[4][4];
    compute_products(problem, tile, groups, q, k + first_key * problem.k.row, first_key, shared.staged, r_s);
    finish_scores(
        problem, arguments.scale, tile, first_key, [](int) { return 0.0F; }, Slope::none, r_s);
    online_softmax(r_s, rows, shared);
    add_values(v + first_key * problem.v.row, problem.v.row, problem.seq_k - first_key, columns, shared, rows);
  }
  store_o<T>(arguments, tile, first_column, columns,
             [&](int row, int n) { return rows.sum[row] == 0 ? 0.0F : rows.o[row][n] / (rows.sum[row] / kHeadroom); });
  for (int row = 0; row < 4; ++row) {
    const int of = 4 * (static_cast<int>(threadIdx.x) / 16) + row;
    if (arguments.lse != nullptr && first_column == 0 && threadIdx.x % 16 == 0 && of < tile.rows) {
      store_lse(arguments, tile, of, rows.maximum[row], rows.sum[row]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  __shared__ ForwardShared shared;
  attend<T>(arguments, blockIdx.x, shared);
}

// The same where lengths are data (cuda/sequence.cuh).
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    sequences_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  __shared__ ForwardShared shared;
  __shared__ OwnParameters<ForwardArguments> own;
  const std::int64_t tiles = arguments.problem.heads_q * arguments.problem.blocks * arguments.tiles;  // of an entry
  attend<T>(own.make(arguments, [&](ForwardArguments& of_entry) { enter<T>(of_entry, blockIdx.x / tiles); }),
            blockIdx.x % tiles, shared);
}

}  // namespace

KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping,
                                        const Execution& /*execution*/) {
  ForwardArguments arguments{};
  arguments.problem = tiled_problem(problem, grouping);
  arguments.tiles = tiles_of_block(arguments.problem);
  arguments.scale = static_cast<float>(problem.softmax_scale());
  arguments.lengths = DeviceLengths(problem);
  arguments.lse_stride = lse_stride(arguments.lengths, arguments.problem);
  const bool near = arguments.problem.near.has;
  const bool sequences = common::has_lengths(problem);
  const std::int64_t tiles = near ? problem.batch * problem.heads_q * common::num_skip_rows(problem)  // of 64 rows
                                  : num_tiles(arguments.problem);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(common::ceil_div(problem.head_dim_v, kColumns)));
  KernelPlan<ForwardTensors> result;
  result.tiles = {{kSide, kSide, problem.head_dim, arguments.problem.groups}};
  result.launches = {{result.tiles.front(), std::int64_t{grid.x} * grid.y, kThreads, 0}};
  result.run = [dtype = problem.dtype, arguments, grid, near, sequences](const ForwardTensors& tensors,
                                                                         const Execution& execution) {
    ForwardArguments with = arguments;
    with.problem.mask.data = tensors.mask;
    with.q = tensors.q;
    with.k = tensors.k;
    with.v = tensors.v;
    with.order = tensors.order;
    with.o = tensors.o;
    with.lse = static_cast<float*>(tensors.lse);
    with.key_means = tensors.key_means;
    with.halves = tensors.halves;
    with.lengths.of = tensors.lengths;
    with_element(dtype, [&]<class T>(std::type_identity<T>) {
      launch(near        ? near_forward_kernel<T>
             : sequences ? sequences_forward_kernel<T>
                         : forward_kernel<T>,
             grid, kThreads, 0, execution.stream, with);
    });
  };
  return result;
}

}  // namespace distr::cuda::plain
