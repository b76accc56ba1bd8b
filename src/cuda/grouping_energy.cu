// SPDX-License-Identifier: Apache-2.0
// Energies and order (method, 2) of every block of Q, and the means over the keys (method, 8), in two launches.
//
//   e_c = sum_n Q_b[n, c]^2 * sum_j (K[j, c] - mean_j K[:, c])^2,  order = columns by descending e, then by column
//
// read_tensors reads Q and K once. Its first thread blocks take runs of keys, the others take pieces of blocks of Q:
//   K  A thread sums differences from a pivot, and their squares. The pivot is a key of the run's first strip (of the
//      second if the first is one key). At the end of a strip, lanes, warps and groups are added in shared memory in a
//      fixed order, and the moments of the run so far go to the workspace.
//   Q  A thread sums squares, which are added in the same order.
// With `own` a run is one strip. With `previous` block b uses the keys j < b l + c; strips end there, so its keys are
// whole runs and the first strips of one more, and the first block has energies of 0, hence the identity.
// cuda/means computes the means alone: no thread block takes Q, and nothing is ordered.
// In order_blocks four threads share two columns, and each adds up every fourth run around the mean of the last. The
// energies go to shared memory, where two threads count the columns that come before one.
#include "common/near.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/grouping.h"
#include "cuda/grouping_energy.cuh"
#include "cuda/grouping_plan.h"
#include "cuda/grouping_rank.cuh"
#include "cuda/heuristics.h"
#include "cuda/workspace.h"

namespace distr::cuda::energy {
namespace {

// A thread block orders part_blocks blocks of Q of a head, one after another. Of a warp's 16 columns four lanes
// share two neighbours, and two lanes then count one column's rank.
template <int kLoads>
__global__ void __maxnreg__(kLoads <= kRunLoads ? 64 : 104) order_blocks(const Arguments a) {
  alignas(16) __shared__ float s_energies[kMaxHeadDim];
  launch_dependent_grids();
  const auto in_warp = static_cast<int>(threadIdx.x % 32);
  const int warp_columns = static_cast<int>(threadIdx.x) / 32 * 16;
  const int columns = warp_columns + in_warp % 8 * 2;  // the first of two that four lanes share
  const int column = columns + in_warp / 8 % 2;        // the one whose energy the lane has
  const int ranked = warp_columns + in_warp % 16;      // the one whose rank the lane counts
  const std::uint32_t head = blockIdx.x;
  const auto blocks = static_cast<int>(a.queries.blocks.value());
  const auto pieces = static_cast<int>(a.queries.pieces.value());
  const int first = static_cast<int>(blockIdx.y) * a.part_blocks;
  const std::int64_t row = static_cast<std::int64_t>(head) * blocks + first;  // of the order
  const float* squares = a.squares + row * pieces * a.width + column;
  std::int32_t* order = a.order + row * a.head_dim;
  const std::int64_t kv_head = head / a.heads_per_kv;
  const Moments* runs = a.runs + kv_head * a.keys.runs.value() * a.width + columns;
  const Moments* strips = a.strips + kv_head * a.keys.strips * a.width + columns;
  const auto reader_for = [&](int block) {
    return MomentReader(a.keys, runs, strips, a.width, in_warp / 8, a.keys.strips_of(block));
  };
  MomentReader reader = reader_for(first);  // before the wait
  Moments moments{};
#pragma unroll 1
  for (int block = first; block < min(first + a.part_blocks, blocks); ++block) {
    if (block == first) {
      wait_on_dependent_grids();  // in the loop, as above
    }
    const bool by_blocks = a.keys.block_strips > 0;  // else all blocks need the same keys
    if (block == first || by_blocks) {
      moments = reader.strips() > 0 ? reader.total<kLoads>() : Moments{};
      if (a.key_means != nullptr && (by_blocks || block == 0) && head % a.heads_per_kv == 0 && in_warp < 16 &&
          column < a.head_dim) {
        a.key_means[(kv_head * (by_blocks ? blocks : 1) + block) * a.head_dim + column] = moments.mean;
      }
    }
    if (a.order == nullptr) {
      reader = by_blocks ? reader_for(block + 1) : reader;
      continue;
    }
    const float square = sum_of_pieces(squares, pieces, a.width);
    const float product = square * (by_blocks && block == 0 ? 0 : moments.squares);
    if (in_warp < 16) {
      s_energies[column] = column >= a.head_dim ? -1 : isnan(product) ? INFINITY : product;
    }
    __syncthreads();
    const int rank = grouping::rank_by_energy(s_energies[ranked], s_energies);
    if (in_warp < 16 && ranked < a.head_dim) {
      order[rank] = ranked;
    }
    squares += static_cast<std::int64_t>(pieces) * a.width;
    order += a.head_dim;
    reader = by_blocks ? reader_for(block + 1) : reader;
    __syncthreads();  // before the next block's energies
  }
}

// What a call does: it is decided here, and a run decides nothing more.
struct Plan {
  DType dtype;
  Arguments arguments;  // but for the pointers
  Part<float> squares;
  Part<Moments> runs, strips;
  bool aligned_rows;  // of Q and K
  bool orders;        // else the order is the caller's
  int read_threads;
  dim3 read_grid, order_grid;
  void (*order_kernel)(Arguments);

  static Plan of(const Problem& problem, const Grouping& grouping, WorkspaceLayout& workspace);
  [[nodiscard]] std::vector<LaunchShape> launches() const {
    const TileShape tile{arguments.queries.piece_rows, arguments.keys.length, arguments.head_dim, 0};
    return {{tile, read_grid.x, read_threads, 0},
            {tile, std::int64_t{order_grid.x} * order_grid.y, 2 * arguments.width, 0}};
  }

  [[nodiscard]] Arguments with(const GroupingTensors& tensors, void* workspace) const {
    Arguments a = arguments;
    a.queries.q = static_cast<const std::byte*>(tensors.q);
    a.keys.k = static_cast<const std::byte*>(tensors.k);
    a.squares = squares.in(workspace);
    a.runs = runs.in(workspace);
    a.strips = strips.in(workspace);
    a.order = orders ? tensors.order : nullptr;
    a.key_means = tensors.key_means;
    return a;
  }
  [[nodiscard]] bool is_aligned(const GroupingTensors& tensors) const {
    return aligned_rows && (!orders || grouping::is_aligned(tensors.q)) &&
           (arguments.keys.count == 0 || grouping::is_aligned(tensors.k));
  }
};

Plan Plan::of(const Problem& problem, const Grouping& grouping, WorkspaceLayout& workspace) {
  const QueryPieces queries(problem, grouping);
  const bool has_means = common::has_key_means(grouping);
  const KeyStrips keys(problem, queries, has_means);
  const bool orders = traits(grouping.strategy).order == OrderSource::computed;
  const grouping::Warps warps(problem.head_dim);
  const auto d = static_cast<int>(problem.head_dim);
  const int width = (d + 31) / 32 * 32;
  const std::int64_t row_bytes = d * static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t kv_heads = problem.batch * problem.heads_kv;
  const std::int64_t part_blocks = blocks_in_turn(heads * queries.blocks.value());
  const std::int64_t parts = common::ceil_div(queries.blocks.value(), part_blocks);
  const bool many_loads = has_many_loads(keys.runs.value(), heads * parts, width);
  const Arguments arguments{queries,
                            keys,
                            d,
                            width,
                            warps.tiles,
                            warps.groups,
                            static_cast<int>(problem.heads_q / problem.heads_kv),
                            static_cast<int>(part_blocks),
                            nullptr,
                            nullptr,
                            nullptr,
                            nullptr,
                            nullptr};
  const bool aligned_rows =
      (!orders || grouping::has_aligned_rows(queries.strides, problem.batch, problem.heads_q, row_bytes)) &&
      (keys.count == 0 || grouping::has_aligned_rows(keys.strides, problem.batch, problem.heads_kv, row_bytes));
  return {problem.dtype,
          arguments,
          {workspace, "squares of Q", orders ? queries.count * width : 0},
          {workspace, "moments of K", keys.count * width},
          {workspace, "moments of strips", keys.run_strips == 1 ? 0 : kv_heads * keys.strips * width},
          aligned_rows,
          orders,
          warps.count() * 32,
          dim3(static_cast<unsigned>((orders ? queries.count : 0) + keys.count)),
          dim3(static_cast<unsigned>(heads), static_cast<unsigned>(parts)),
          many_loads ? order_blocks<kManyRunLoads> : order_blocks<kRunLoads>};
}

void run_all(const Plan& plan, const GroupingTensors& tensors, const Execution& execution) {
  const Arguments a = plan.with(tensors, execution.workspace);
  if (plan.read_grid.x > 0) {
    grouping::with_loads(plan.dtype, plan.is_aligned(tensors), [&]<class T, int kVector>() {
      launch_dependent(read_tensors<T, kVector>, plan.read_grid, plan.read_threads, 0, execution.stream, a);
    });
  }
  launch_dependent(plan.order_kernel, plan.order_grid, 2 * a.width, 0, execution.stream, a);
}

}  // namespace

std::string supports(const Problem& problem, const Grouping& grouping) {
  return grouping::unsupported_reason(problem, grouping, Strategy::energy);
}

std::string supports_means(const Problem& problem, const Grouping& grouping) {
  const std::string reason = grouping::unsupported_reason(problem, grouping, Strategy::given);
  return reason.empty() && !common::has_key_means(grouping) ? "has nothing to compute without near keys" : reason;
}

KernelPlan<GroupingTensors> plan(const Problem& problem, const Grouping& grouping, const Execution& /*execution*/) {
  return grouping::kernel_plan(problem, grouping, run_all);
}

}  // namespace distr::cuda::energy
