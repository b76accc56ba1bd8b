// SPDX-License-Identifier: Apache-2.0
// Energies and order (method, 2) of every block of Q, in two launches.
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
// In order_blocks four threads share two columns, and each adds up every fourth run around the mean of the last. The
// energies go to shared memory, where two threads count the columns that come before one.
#include "cuda/dependent_launch.cuh"
#include "cuda/grouping.h"
#include "cuda/grouping_loads.cuh"
#include "cuda/grouping_moments.cuh"
#include "cuda/grouping_plan.h"
#include "cuda/grouping_rank.cuh"
#include "cuda/workspace.h"

namespace distr::cuda::energy {
namespace {

using grouping::kMaxThreads;
using grouping::kTileColumns;

constexpr int kOrderGrid = 1024;    // thread blocks of order_blocks, if there are as many blocks of Q
constexpr int kFewColumns = 32768;  // of all its thread blocks: so few run at once on an H200 with 104 registers each
constexpr int kRunLoads = 4;        // loads of a thread of order_blocks that are in flight at once
constexpr int kManyRunLoads = 16;   // the same where columns are few and runs many

struct Arguments {
  QueryPieces queries;
  KeyStrips keys;
  int head_dim;
  int width;            // of a row of the workspace: d rounded up to a multiple of 32
  int tiles;            // of 64 columns
  int groups;           // warps of a tile
  int heads_per_kv;     // query heads that share a KV head
  int part_blocks;      // blocks of Q that a thread block orders
  float* squares;       // [pieces of Q, width]
  Moments* runs;        // [KV heads, runs, width]
  Moments* strips;      // [KV heads, strips, width]: of a run up to the end of each strip but its last
  std::int32_t* order;  // [order rows, d]
};

struct Sums {
  float sum, squares;
};

// Shared memory of read_tensors, which adds up over lanes, warps and groups.
struct Shared {
  float warps[kMaxThreads / 32][2][kTileColumns];  // sums, squares
  float pivots[kMaxThreads / 32 * kTileColumns];   // of the run
};

// Adds the lanes of a warp, hands them to the other warps, and calls visit(column, its sums) for each column of the
// workspace, by one thread. `values`: 8 columns' squares, or their sums and squares. `shared` may be written again
// after the next __syncthreads.
template <int kVector, int kCount, class Visitor>
__device__ void add_up(const Arguments& a, float (&values)[kCount], const Lane& lane, Shared& shared, Visitor visit) {
  add_quad(values, lane.t);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int at = 16 - kCount + lane.t % 2 * (kCount / 2) + lane.t / 2 * (kCount / 4) + i;
    shared.warps[threadIdx.x / 32][at / 8][grouping::column_of(kVector, lane.g, at % 8)] = values[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < a.width; c += static_cast<int>(blockDim.x)) {
    Sums total{};
#pragma unroll
    for (int group = 0; group < grouping::kMaxGroups; ++group) {
      if (group < a.groups) {
        const auto& more = shared.warps[c / kTileColumns * a.groups + group];
        total = {kCount == 16 ? total.sum + more[0][c % kTileColumns] : 0, total.squares + more[1][c % kTileColumns]};
      }
    }
    visit(c, total);
  }
}

// Writes the moments of one run up to the end of each of its strips.
template <class T, int kVector>
__device__ void read_run(const Arguments& a, const Lane& lane, Shared& shared) {
  using Round = grouping::Round<T, kVector>;
  const std::uint32_t head = blockIdx.x / a.keys.runs;
  int strip = static_cast<int>(blockIdx.x % a.keys.runs) * a.keys.run_strips;
  const int end = min(strip + a.keys.run_strips, a.keys.strips);
  const int start = a.keys.start(strip);
  const auto middle_of = [&](int of_strip) {  // the first key of a head is often far from all others
    return a.keys.keys(head, (a.keys.start(of_strip) + a.keys.start(of_strip + 1)) / 2, 0).first;
  };
  const std::byte* pivot_row = middle_of(strip);             // loaded in place of missing rows: its difference is 0
  const bool keeps_pivots = lane.t == 0 && lane.group == 0;  // this lane stores those of its columns
  RowSpan rows = a.keys.keys(head, start, a.keys.start(strip + 1));
  int n = 0;
  float pivots[8];
  LaneSums run;
  const auto take_pivots = [&] {
    const typename Round::Row pivot = Round::load_row(pivot_row, true, lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      pivots[i] = Round::value(pivot, i);
      if (keeps_pivots) {
        shared.pivots[lane.tile * kTileColumns + grouping::column_of(kVector, lane.g, i)] = pivots[i];
      }
    }
  };
#pragma unroll 1
  for (bool begins = true;; begins = false) {
    if (begins) {
      wait_on_dependent_grids();  // in the loop, so that the compiler does not move the code above behind the wait
    }
    Round round;
    round.load(rows, n, lane, pivot_row);
    if (begins) {
      take_pivots();
    }
    run.add(round, pivots);
    n += Round::rows(lane);
    if (n < rows.count) {
      continue;
    }
    const int next = strip + 1;
    const auto count = static_cast<float>(a.keys.start(next) - start);
    Moments* moments = next == end ? a.runs + static_cast<std::int64_t>(blockIdx.x) * a.width
                                   : a.strips + (static_cast<std::int64_t>(head) * a.keys.strips + strip) * a.width;
    float values[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = run.sums[i];
      values[8 + i] = run.squares[i];
    }
    add_up<kVector>(a, values, lane, shared, [&](int column, const Sums& sums) {
      moments[column] = {shared.pivots[column] + (count > 0 ? __fdividef(sums.sum, count) : 0),
                         centered_squares(count, sums.sum, sums.squares)};
    });
    if (next == end) {
      break;
    }
    __syncthreads();   // the sums have been read
    if (count == 1) {  // the strip was the pivot alone, so a key of the next strip becomes the pivot
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        run.sums[i] = pivots[i];
      }
      pivot_row = middle_of(next);
      take_pivots();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        run.sums[i] = keeps_pivots ? run.sums[i] - pivots[i] : 0;
        run.squares[i] = run.sums[i] * run.sums[i];
      }
    }
    rows = a.keys.keys(head, a.keys.start(next), a.keys.start(next + 1));
    strip = next;
    n = 0;
  }
}

// Writes the sums of squares of one piece of a block of Q.
template <class T, int kVector>
__device__ void read_queries(const Arguments& a, std::uint32_t piece, const Lane& lane, Shared& shared) {
  using Round = grouping::Round<T, kVector>;
  const RowSpan rows = a.queries.at(piece);
  LaneSums sums;
  int n = 0;
#pragma unroll 1
  do {
    if (n == 0) {
      wait_on_dependent_grids();  // in the loop, as above
    }
    Round round;
    round.load(rows, n, lane);
    sums.add_squares(round);
    n += Round::rows(lane);
  } while (n < rows.count);
  float* squares = a.squares + static_cast<std::int64_t>(piece) * a.width;
  add_up<kVector>(a, sums.squares, lane, shared,
                  [&](int column, const Sums& total) { squares[column] = total.squares; });
}

template <class T, int kVector>
__global__ void __launch_bounds__(kMaxThreads, 2) read_tensors(const Arguments a) {
  __shared__ Shared shared;
  launch_dependent_grids();
  const Lane lane(a.groups, a.head_dim);
  const auto runs = static_cast<std::uint32_t>(a.keys.count);
  if (blockIdx.x < runs) {
    read_run<T, kVector>(a, lane, shared);
  } else {
    read_queries<T, kVector>(a, blockIdx.x - runs, lane, shared);
  }
}

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
  float centered = 0;
#pragma unroll 1
  for (int block = first; block < min(first + a.part_blocks, blocks); ++block) {
    if (block == first) {
      wait_on_dependent_grids();  // in the loop, as above
    }
    const float square = sum_of_pieces(squares, pieces, a.width);
    if (block == first || a.keys.block_strips > 0) {  // else all blocks need the same keys
      centered = reader.strips() > 0 ? reader.total<kLoads>() : 0;
    }
    const float product = square * centered;
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
    if (a.keys.block_strips > 0) {
      reader = reader_for(block + 1);
    }
    __syncthreads();  // before the next block's energies
  }
}

// Reads what read_tensors reads and does nothing else.
template <class T, int kVector>
__global__ void __launch_bounds__(kMaxThreads, 2) read_only(const Arguments a) {
  using Round = grouping::Round<T, kVector>;
  const Lane lane(a.groups, a.head_dim);
  const auto runs = static_cast<std::uint32_t>(a.keys.count);
  RowSpan rows;
  if (blockIdx.x < runs) {
    const int first = static_cast<int>(blockIdx.x % a.keys.runs) * a.keys.run_strips;
    const int end = min(first + a.keys.run_strips, a.keys.strips);
    rows = a.keys.keys(blockIdx.x / a.keys.runs, a.keys.start(first), a.keys.start(end));
  } else {
    rows = a.queries.at(blockIdx.x - runs);
  }
  std::uint32_t seen = 0;
  for (int n = 0; n < rows.count; n += Round::rows(lane)) {
    Round round;
    round.load(rows, n, lane);
    seen |= round.any();
  }
  if (a.queries.count == 0) {  // never true, but the compiler must keep the loads for it
    a.order[threadIdx.x] = static_cast<std::int32_t>(seen);
  }
}

// Does nothing but wait for the kernel before it.
__global__ void only_wait(const Arguments /*a*/) { wait_on_dependent_grids(); }

// What a call does: it is decided here, and a run decides nothing more.
struct Plan {
  DType dtype;
  Arguments arguments;  // but for the pointers
  Part<float> squares;
  Part<Moments> runs, strips;
  bool aligned_rows;  // of Q and K
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
    a.order = tensors.order;
    return a;
  }
  [[nodiscard]] bool is_aligned(const GroupingTensors& tensors) const {
    return aligned_rows && grouping::is_aligned(tensors.q) &&
           (arguments.keys.count == 0 || grouping::is_aligned(tensors.k));
  }
};

Plan Plan::of(const Problem& problem, const Grouping& grouping, WorkspaceLayout& workspace) {
  const QueryPieces queries(problem, grouping);
  const KeyStrips keys(problem, queries);
  const grouping::Warps warps(problem.head_dim);
  const auto d = static_cast<int>(problem.head_dim);
  const int width = (d + 31) / 32 * 32;
  const std::int64_t row_bytes = d * static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t kv_heads = problem.batch * problem.heads_kv;
  const std::int64_t part_blocks = std::max<std::int64_t>(1, heads * queries.blocks.value() / kOrderGrid);
  const std::int64_t parts = common::ceil_div(queries.blocks.value(), part_blocks);
  const bool many_loads = keys.runs.value() > 4 * kRunLoads && heads * parts * width <= kFewColumns && width <= 256;
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
                            nullptr};
  const bool aligned_rows =
      grouping::has_aligned_rows(queries.strides, problem.batch, problem.heads_q, row_bytes) &&
      (keys.count == 0 || grouping::has_aligned_rows(keys.strides, problem.batch, problem.heads_kv, row_bytes));
  return {problem.dtype,
          arguments,
          {workspace, "squares of Q", queries.count * width},
          {workspace, "moments of K", keys.count * width},
          {workspace, "moments of strips", keys.run_strips == 1 ? 0 : kv_heads * keys.strips * width},
          aligned_rows,
          warps.count() * 32,
          dim3(static_cast<unsigned>(queries.count + keys.count)),
          dim3(static_cast<unsigned>(heads), static_cast<unsigned>(parts)),
          many_loads ? order_blocks<kManyRunLoads> : order_blocks<kRunLoads>};
}

void run_all(const Plan& plan, const GroupingTensors& tensors, const Execution& execution) {
  const Arguments a = plan.with(tensors, execution.workspace);
  grouping::with_loads(plan.dtype, plan.is_aligned(tensors), [&]<class T, int kVector>() {
    launch_dependent(read_tensors<T, kVector>, plan.read_grid, plan.read_threads, 0, execution.stream, a);
  });
  launch_dependent(plan.order_kernel, plan.order_grid, 2 * a.width, 0, execution.stream, a);
}

void run_read_only(const Plan& plan, const GroupingTensors& tensors, const Execution& execution) {
  grouping::with_loads(plan.dtype, plan.is_aligned(tensors), [&]<class T, int kVector>() {
    launch(read_only<T, kVector>, plan.read_grid, plan.read_threads, 0, execution.stream, plan.with(tensors, nullptr));
  });
}

void run_read_and_wait(const Plan& plan, const GroupingTensors& tensors, const Execution& execution) {
  run_read_only(plan, tensors, execution);
  launch_dependent(only_wait, dim3(1), 32, 0, execution.stream, plan.with(tensors, nullptr));
}

}  // namespace

std::string supports(const Problem& problem, const Grouping& grouping) {
  return grouping::unsupported_reason(problem, grouping, Strategy::energy);
}

KernelPlan<GroupingTensors> plan(const Problem& problem, const Grouping& grouping, const Execution& /*execution*/) {
  return grouping::kernel_plan(problem, grouping, run_all);
}

KernelPlan<GroupingTensors> plan_read_only(const Problem& problem, const Grouping& grouping, const Execution&) {
  return grouping::kernel_plan(problem, grouping, run_read_only);
}

KernelPlan<GroupingTensors> plan_read_and_wait(const Problem& problem, const Grouping& grouping, const Execution&) {
  return grouping::kernel_plan(problem, grouping, run_read_and_wait);
}

}  // namespace distr::cuda::energy
