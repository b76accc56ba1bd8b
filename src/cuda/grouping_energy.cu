// SPDX-License-Identifier: Apache-2.0
// Energies and order (method, 2) of every block of Q, in two launches.
//
//   e_c = sum_n Q_b[n, c]^2 * sum_j (K[j, c] - mean_j K[:, c])^2,  order = columns by descending e, then by column
//
// read_tensors reads Q and K once. Its first blocks of threads take runs of keys, the others pieces of blocks of Q:
//   K  a lane takes mean and squared differences of up to 8 rows in registers, in two passes, and merges them into its
//      sums (Chan, Golub and LeVeque, 1979), so that a large mean does not drown the spread; where a strip of keys
//      ends, lanes, warps and groups are merged in a fixed order and the run's sums so far go to the workspace.
//   Q  squares, added over lanes, warps and groups in a fixed order.
// With `own` a run is one strip. With `previous` block b needs the keys j < b l + c: strips end there, and the keys of
// a block are some whole runs and the first strips of one more. order_blocks merges the runs once for up to 512 / d
// blocks of Q, and thread c counts the columns that come before c. A block without rows before it (`previous`) has
// energies of 0, hence the identity.
#include "cuda/early.cuh"
#include "cuda/grouping.h"
#include "cuda/grouping_rows.cuh"
#include "cuda/grouping_spread.cuh"

namespace distr::cuda::energy {
namespace {

using grouping::kMaxThreads;
using grouping::kTileColumns;

constexpr int kOrderThreads = 512;

struct Arguments {
  QueryPieces queries;
  KeyStrips keys;
  int head_dim;
  int tiles;            // of 64 columns
  int groups;           // warps of a tile
  int heads_per_kv;     // query heads that share a KV head
  float* squares;       // [pieces of Q, d]
  float2* spreads;      // [KV heads, strips, d]: mean and squared differences of a run up to the end of a strip
  std::int32_t* order;  // [order rows, d]
};

struct Shared {
  float2 sums[kMaxThreads / 32][kTileColumns];  // of a warp: mean and squared differences, or squares of Q
  float counts[kMaxThreads / 32];
};

// The columns of the block of threads, each by one thread: visit(column, first warp of its tile, column in the tile).
template <class Visitor>
__device__ void for_each_column(const Arguments& a, Visitor visit) {
  for (int c = static_cast<int>(threadIdx.x); c < a.head_dim; c += static_cast<int>(blockDim.x)) {
    visit(c, c / kTileColumns * a.groups, c % kTileColumns);
  }
}

// Spreads of the strips of one run, each from the run's first key on.
template <class T, int kVector>
__device__ void read_run(const Arguments& a, const Lane& lane, Shared& shared) {
  using Round = grouping::Round<T, kVector>;
  const std::uint32_t head = blockIdx.x / a.keys.runs;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int first = static_cast<int>(blockIdx.x % a.keys.runs) * a.keys.run_strips;
  const int end = min(first + a.keys.run_strips, a.keys.strips);
  LaneSpread run;
  for (int strip = first; strip < end; ++strip) {
    const Rows rows = a.keys.keys(head, a.keys.start(strip), a.keys.start(strip + 1));
    for (int n = 0; n < rows.count; n += Round::rows(lane)) {
      Round round;
      round.load(rows, n, lane);
      run.add(round, n, rows.count, lane);
    }
    LaneSpread merged = run;
    merged.merge_quad();
    __syncthreads();  // the last strip's sums have been read
    if (lane.t == 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        shared.sums[warp][grouping::column_of(kVector, lane.g, i)] = {merged.mean[i], merged.squares[i]};
      }
      shared.counts[warp] = merged.count;
    }
    __syncthreads();
    for_each_column(a, [&](int column, int first_warp, int in_tile) {
      Spread total{};
      for (int group = 0; group < a.groups; ++group) {
        const float2 sums = shared.sums[first_warp + group][in_tile];
        total.merge({shared.counts[first_warp + group], sums.x, sums.y});
      }
      a.spreads[(static_cast<std::int64_t>(head) * a.keys.strips + strip) * a.head_dim + column] = {total.mean,
                                                                                                    total.squares};
    });
  }
}

// Sums of squares of one piece of a block of Q.
template <class T, int kVector>
__device__ void read_queries(const Arguments& a, std::uint32_t piece, const Lane& lane, Shared& shared) {
  using Round = grouping::Round<T, kVector>;
  const Rows rows = a.queries.at(piece);
  float squares[8] = {};
  for (int n = 0; n < rows.count; n += Round::rows(lane)) {
    Round round;
    round.load(rows, n, lane);
#pragma unroll
    for (int chunk = 0; chunk < Round::kChunks; ++chunk) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float x = round.value(chunk, r, i);
          squares[i] += x * x;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    squares[i] += __shfl_xor_sync(~0U, squares[i], 1);
    squares[i] += __shfl_xor_sync(~0U, squares[i], 2);
    if (lane.t == 0) {
      shared.sums[threadIdx.x / 32][grouping::column_of(kVector, lane.g, i)].x = squares[i];
    }
  }
  __syncthreads();
  for_each_column(a, [&](int column, int first_warp, int in_tile) {
    float total = 0;
    for (int group = 0; group < a.groups; ++group) {
      total += shared.sums[first_warp + group][in_tile].x;
    }
    a.squares[static_cast<std::int64_t>(piece) * a.head_dim + column] = total;
  });
}

template <class T, int kVector>
__global__ void __launch_bounds__(kMaxThreads, 2) read_tensors(const Arguments a) {
  __shared__ Shared shared;
  release_dependent();
  wait_for_inputs();
  const Lane lane(a.groups, a.head_dim);
  const auto runs = static_cast<std::uint32_t>(a.keys.count);
  if (blockIdx.x < runs) {
    read_run<T, kVector>(a, lane, shared);
  } else {
    read_queries<T, kVector>(a, blockIdx.x - runs, lane, shared);
  }
}

constexpr int kLoadsAhead = 8;  // of a thread of order_blocks, under way at the same time

struct OrderShared {
  Spread spreads[kOrderThreads];
  alignas(16) std::uint64_t keys[kOrderThreads];  // falling energy, then column
};

// What one thread of order_blocks reads: the spreads of one column of a KV head.
struct RunReader {
  const KeyStrips& keys;
  const float2* spreads;  // [strips, d] from the column on
  int head_dim;

  // A run up to strip `end`.
  [[nodiscard]] __device__ Spread at(int run, int end) const {
    const float2 sums = spreads[static_cast<std::int64_t>(end - 1) * head_dim];
    const int count = keys.start(end) - keys.start(run * keys.run_strips);
    return {static_cast<float>(count), sums.x, sums.y};
  }
  // The whole runs first, first + step, .. below `end`.
  [[nodiscard]] __device__ Spread merge(int first, int end, int step) const {
    Spread result{};
    for (; first < end; first += kLoadsAhead * step) {
      Spread runs[kLoadsAhead];
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i) {
        const int run = first + i * step;
        runs[i] = run < end ? at(run, (run + 1) * keys.run_strips) : Spread{};
      }
#pragma unroll
      for (const Spread& run : runs) {
        result.merge(run);
      }
    }
    return result;
  }
};

// The sum of a column's squares over the pieces of a block of Q; `squares`: [pieces, d] from the column on.
[[nodiscard]] __device__ inline float sum_of_pieces(const float* squares, int pieces, int head_dim) {
  float sum = *squares;
  for (int first = 1; first < pieces; first += kLoadsAhead) {
    float loaded[kLoadsAhead];
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      loaded[i] = first + i < pieces ? squares[static_cast<std::int64_t>(first + i) * head_dim] : 0;
    }
#pragma unroll
    for (const float square : loaded) {
      sum += square;
    }
  }
  return sum;
}

// A block of threads has 512 / width groups of `width` threads, d rounded up to 32; each orders one block of Q.
__global__ void __launch_bounds__(kOrderThreads, 1) order_blocks(const Arguments a) {
  __shared__ OrderShared shared;
  release_dependent();
  const int width = (a.head_dim + 31) / 32 * 32;
  const int groups = kOrderThreads / width;
  const int group = static_cast<int>(threadIdx.x) / width;
  const int column = static_cast<int>(threadIdx.x) % width;
  const std::uint32_t parts = (a.queries.blocks + groups - 1) / groups;  // of a head
  const std::uint32_t head = blockIdx.x / parts;
  const int first_block = static_cast<int>(blockIdx.x % parts) * groups;
  const int block = first_block + group;
  const std::int64_t row = static_cast<std::int64_t>(head) * a.queries.blocks + block;  // of the order
  const bool has_column = group < groups && column < a.head_dim;
  const bool valid = has_column && block < static_cast<int>(a.queries.blocks);

  // Runs that all blocks of Q here need, but for the first of all, which needs none.
  const auto previous = static_cast<int>(a.queries.previous);
  const int shared_runs = a.keys.strips_of(max(first_block, previous)) / a.keys.run_strips;
  const int strips = a.keys.strips_of(block);
  const int whole_runs = strips / a.keys.run_strips;
  const float2* spreads =
      a.spreads + static_cast<std::int64_t>(head / a.heads_per_kv) * a.keys.strips * a.head_dim + column;
  const RunReader reader{a.keys, spreads, a.head_dim};
  const float* squares = a.squares + row * a.queries.pieces * a.head_dim + column;

  wait_for_inputs();
  const float square = valid ? sum_of_pieces(squares, static_cast<int>(a.queries.pieces), a.head_dim) : 0;
  // Every group of threads merges some of the shared runs, and what its own block needs beyond them.
  shared.spreads[threadIdx.x] = has_column ? reader.merge(group, shared_runs, groups) : Spread{};
  Spread rest{};
  if (valid) {
    rest = reader.merge(shared_runs, whole_runs, 1);
    if (whole_runs * a.keys.run_strips < strips) {
      rest.merge(reader.at(whole_runs, strips));
    }
  }
  __syncthreads();
  std::uint64_t key = ~std::uint64_t{0};
  if (valid) {
    Spread spread{};
    for (int other = 0; other < groups; ++other) {
      spread.merge(shared.spreads[other * width + column]);
    }
    spread.merge(rest);
    const float energy = block < previous ? 0 : square * spread.squares;
    const std::uint32_t bits = __float_as_uint(isnan(energy) ? INFINITY : energy);  // never negative
    key = static_cast<std::uint64_t>(~bits) << 32 | static_cast<std::uint32_t>(column);
  }
  shared.keys[threadIdx.x] = key;
  __syncthreads();
  if (valid) {
    a.order[row * a.head_dim + grouping::rank_of(key, shared.keys + group * width, a.head_dim)] = column;
  }
}

// The reads of read_tensors and nothing else.
template <class T, int kVector>
__global__ void __launch_bounds__(kMaxThreads, 2) read_only(const Arguments a) {
  using Round = grouping::Round<T, kVector>;
  const Lane lane(a.groups, a.head_dim);
  const auto runs = static_cast<std::uint32_t>(a.keys.count);
  Rows rows;
  if (blockIdx.x < runs) {
    const int first = static_cast<int>(blockIdx.x % a.keys.runs) * a.keys.run_strips;
    rows = a.keys.keys(blockIdx.x / a.keys.runs, a.keys.start(first), a.keys.start(first + a.keys.run_strips));
  } else {
    rows = a.queries.at(blockIdx.x - runs);
  }
  std::uint32_t seen = 0;
  for (int n = 0; n < rows.count; n += Round::rows(lane)) {
    Round round;
    round.load(rows, n, lane);
    seen |= round.any();
  }
  if (a.queries.count == 0) {  // never: it keeps the loads
    a.order[threadIdx.x] = static_cast<std::int32_t>(seen);
  }
}

// A launch behind the reads that does nothing.
__global__ void only_wait(const Arguments /*a*/) { wait_for_inputs(); }

struct Plan {
  Arguments arguments;
  int threads;
  dim3 read_grid, order_grid;
  bool aligned;
  std::size_t workspace_bytes;
};

Plan plan_of(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors, void* memory) {
  const QueryPieces queries(problem, grouping, tensors.q);
  const KeyStrips keys(problem, queries, tensors.k);
  const grouping::Warps warps(problem.head_dim);
  const std::int64_t d = problem.head_dim;
  const std::int64_t row_bytes = d * static_cast<std::int64_t>(size_of(problem.dtype));
  const bool aligned =
      grouping::is_aligned(tensors.q, queries.strides, problem.batch, problem.heads_q, row_bytes) &&
      (keys.count == 0 || grouping::is_aligned(tensors.k, keys.strides, problem.batch, problem.heads_kv, row_bytes));
  Workspace workspace(memory);
  float* squares = workspace.take<float>(queries.count * d);
  float2* spreads = workspace.take<float2>(problem.batch * problem.heads_kv * keys.strips * d);
  const std::int64_t order_groups = kOrderThreads / (common::ceil_div(d, 32) * 32);
  const std::int64_t parts = common::ceil_div(queries.blocks, order_groups);
  const Arguments arguments{queries,     keys,         static_cast<int>(d),
                            warps.tiles, warps.groups, static_cast<int>(problem.heads_q / problem.heads_kv),
                            squares,     spreads,      tensors.order};
  return {arguments,
          warps.count() * 32,
          dim3(static_cast<unsigned>(queries.count + keys.count)),
          dim3(static_cast<unsigned>(problem.batch * problem.heads_q * parts)),
          aligned,
          workspace.used()};
}

}  // namespace

std::string supports(const Problem& problem, const Grouping& grouping) {
  return grouping::refusal(problem, grouping, Strategy::energy, "energy");
}

std::size_t workspace_bytes(const Problem& problem, const Grouping& grouping, int /*threads*/) {
  return plan_of(problem, grouping, {}, nullptr).workspace_bytes;
}

void run(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors, const Execution& execution) {
  const Plan plan = plan_of(problem, grouping, tensors, execution.workspace);
  if (plan.arguments.queries.count == 0) {
    return;
  }
  grouping::with_loads(problem.dtype, plan.aligned, [&]<class T, int kVector>() {
    launch_early(read_tensors<T, kVector>, plan.read_grid, plan.threads, 0, execution.stream, plan.arguments);
  });
  launch_early(order_blocks, plan.order_grid, kOrderThreads, 0, execution.stream, plan.arguments);
}

void run_read_only(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                   const Execution& execution) {
  const Plan plan = plan_of(problem, grouping, tensors, nullptr);
  if (plan.arguments.queries.count == 0) {
    return;
  }
  grouping::with_loads(problem.dtype, plan.aligned, [&]<class T, int kVector>() {
    launch(read_only<T, kVector>, plan.read_grid, plan.threads, 0, execution.stream, plan.arguments);
  });
}

void run_read_and_wait(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                       const Execution& execution) {
  run_read_only(problem, grouping, tensors, execution);
  launch_early(only_wait, dim3(1), 32, 0, execution.stream, plan_of(problem, grouping, tensors, nullptr).arguments);
}

}  // namespace distr::cuda::energy
