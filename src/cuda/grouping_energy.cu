// SPDX-License-Identifier: Apache-2.0
// Energies and order (method, 2) of every block of Q, in two launches.
//
//   e_c = sum_n Q_b[n, c]^2 * sum_j (K[j, c] - mean_j K[:, c])^2,  order = columns by descending e, then by column
//
// read_tensors reads Q and K once. Its first blocks of threads take runs of keys, the others pieces of blocks of Q:
//   K  sums and squares of the differences from a key of the run's first strip. Where a strip of keys ends, lanes,
//      warps and groups are added in a fixed order, and mean and spread of the run so far go to the workspace.
//   Q  squares, added in the same order.
// With `own` a run is one strip. With `previous` block b needs the keys j < b l + c: strips end there, and the keys of
// a block are some whole runs and the first strips of one more. In order_blocks thread c adds up the runs, around the
// mean of the first, and counts the columns that come before c. A block without rows before it (`previous`) has
// energies of 0, hence the identity.
#include "cuda/early.cuh"
#include "cuda/grouping.h"
#include "cuda/grouping_rows.cuh"
#include "cuda/grouping_spread.cuh"

namespace distr::cuda::energy {
namespace {

using grouping::kMaxThreads;
using grouping::kTileColumns;

constexpr int kOrderGrid = 1024;  // blocks of threads of order_blocks, if there are as many blocks of Q

struct Arguments {
  QueryPieces queries;
  KeyStrips keys;
  int head_dim;
  int tiles;            // of 64 columns
  int groups;           // warps of a tile
  int heads_per_kv;     // query heads that share a KV head
  int part_blocks;      // blocks of Q that a block of threads orders
  float* squares;       // [pieces of Q, d]
  Spread* runs;         // [KV heads, runs, d]
  Spread* strips;       // [KV heads, strips, d]: of a run up to the end of a strip that is not its last
  std::int32_t* order;  // [order rows, d]
};

struct Sums {
  float sum, squares;
};

// What read_tensors adds up over lanes, warps and groups.
struct Shared {
  float warps[kMaxThreads / 32][2][kTileColumns];  // sums, squares
  float pivots[kMaxThreads / 32 * kTileColumns];   // of a run
};

// Adds lanes 4 g .. 4 g + 3: lane t gets the sums of kCount / 4 of their values, from t % 2 * kCount / 2 + t / 2 *
// kCount / 4 on.
template <int kCount>
__device__ void add_quad(float (&values)[kCount], int t) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const int half = kCount / 2 / step;
    const bool upper = (t & step) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float lower = values[i];
      const float given = __shfl_xor_sync(~0U, upper ? lower : values[half + i], step);
      values[i] = (upper ? values[half + i] : lower) + given;
    }
  }
}

// Adds the lanes of a warp, hands them to the other warps, and calls visit(column, its sums) for each column, by one
// thread. `values`: 8 columns' squares, or their sums and squares. `shared` may be written again after the next
// __syncthreads.
template <int kVector, int kCount, class Visitor>
__device__ void add_up(const Arguments& a, float (&values)[kCount], const Lane& lane, Shared& shared, Visitor visit) {
  add_quad(values, lane.t);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int at = 16 - kCount + lane.t % 2 * (kCount / 2) + lane.t / 2 * (kCount / 4) + i;
    shared.warps[threadIdx.x / 32][at / 8][grouping::column_of(kVector, lane.g, at % 8)] = values[i];
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < a.head_dim; c += static_cast<int>(blockDim.x)) {
    Sums total{};
    for (int group = 0; group < a.groups; ++group) {
      const auto& more = shared.warps[c / kTileColumns * a.groups + group];
      total = {kCount == 16 ? total.sum + more[0][c % kTileColumns] : 0, total.squares + more[1][c % kTileColumns]};
    }
    visit(c, total);
  }
}

// Spreads of the strips of one run, each from the run's first key on.
template <class T, int kVector>
__device__ void read_run(const Arguments& a, const Lane& lane, Shared& shared) {
  using Round = grouping::Round<T, kVector>;
  const std::uint32_t head = blockIdx.x / a.keys.runs;
  const int first = static_cast<int>(blockIdx.x % a.keys.runs) * a.keys.run_strips;
  const int end = min(first + a.keys.run_strips, a.keys.strips);
  const int start = a.keys.start(first);
  const int middle = (start + a.keys.start(first + 1)) / 2;  // not the head's first key, which is often far from others
  const typename Round::Row pivot = Round::load_row(a.keys.keys(head, middle, 0).first, middle < a.keys.seq, lane, {});
  float pivots[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pivots[i] = Round::value(pivot, i);
    if (lane.t == 0 && lane.group == 0) {
      shared.pivots[lane.tile * kTileColumns + grouping::column_of(kVector, lane.g, i)] = pivots[i];
    }
  }
  LaneSums run;
  for (int strip = first; strip < end; ++strip) {
    const Rows rows = a.keys.keys(head, a.keys.start(strip), a.keys.start(strip + 1));
    for (int n = 0; n < rows.count; n += Round::rows(lane)) {
      Round round;
      round.load(rows, n, lane, pivot);  // the pivot's differences from itself are 0
      run.add(round, pivots);
    }
    __syncthreads();  // the last strip's sums have been read
    const auto count = static_cast<float>(a.keys.start(strip + 1) - start);
    Spread* spreads = strip + 1 == end
                          ? a.runs + static_cast<std::int64_t>(blockIdx.x) * a.head_dim
                          : a.strips + (static_cast<std::int64_t>(head) * a.keys.strips + strip) * a.head_dim;
    float values[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = run.sums[i];
      values[8 + i] = run.squares[i];
    }
    add_up<kVector>(a, values, lane, shared, [&](int column, const Sums& sums) {
      spreads[column] = {shared.pivots[column] + (count > 0 ? __fdividef(sums.sum, count) : 0),
                         squares_around_mean(count, sums.sum, sums.squares)};
    });
  }
}

// Sums of squares of one piece of a block of Q.
template <class T, int kVector>
__device__ void read_queries(const Arguments& a, std::uint32_t piece, const Lane& lane, Shared& shared) {
  using Round = grouping::Round<T, kVector>;
  const Rows rows = a.queries.at(piece);
  LaneSums sums;
  for (int n = 0; n < rows.count; n += Round::rows(lane)) {
    Round round;
    round.load(rows, n, lane);
    sums.add_squares(round);
  }
  float* squares = a.squares + static_cast<std::int64_t>(piece) * a.head_dim;
  add_up<kVector>(a, sums.squares, lane, shared,
                  [&](int column, const Sums& total) { squares[column] = total.squares; });
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

constexpr int kLoadsAhead = 16;  // of a thread of order_blocks, under way at the same time

// The spread of a column of a KV head.
struct SpreadReader {
  const KeyStrips& keys;
  const Spread* runs;    // [runs, d] from the column on
  const Spread* strips;  // [strips, d] from the column on
  int head_dim;

  __device__ SpreadReader(const Arguments& a, std::uint32_t head, int column)
      : keys(a.keys),
        runs(a.runs + static_cast<std::int64_t>(head) * a.keys.runs * a.head_dim + column),
        strips(a.strips + static_cast<std::int64_t>(head) * a.keys.strips * a.head_dim + column),
        head_dim(a.head_dim) {}

  // sum_j (K[j, c] - mean_j K[:, c])^2 over the first `end` strips, of which there is at least one.
  [[nodiscard]] __device__ float up_to(int end) const {
    const int end_run = end == keys.strips ? static_cast<int>(keys.runs) : end / keys.run_strips;
    const int end_strip = min(end_run * keys.run_strips, end);
    const auto end_key = static_cast<float>(keys.start(end_strip));
    const auto all_keys = static_cast<float>(keys.start(end));
    const auto run_keys = static_cast<float>(keys.run_strips * keys.length);  // but for the first and the last run
    auto run_end = static_cast<float>(keys.start(keys.run_strips));
    const Spread* rest = strips + static_cast<std::int64_t>(end - 1) * head_dim;  // of the run that is not whole
    Spreads sums{(end_run > 0 ? runs : rest)->mean};
    for (int first = 0; first < end_run; first += kLoadsAhead) {
      Spread loaded[kLoadsAhead];
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i) {
        loaded[i] = first + i < end_run ? runs[(first + i) * head_dim] : Spread{};
      }
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i) {
        const float count = fminf(run_end, end_key) - fmaxf(run_end - run_keys, 0);
        sums.add(fmaxf(count, 0), loaded[i]);  // none behind the last run
        run_end += run_keys;
      }
    }
    if (end_strip < end) {
      sums.add(all_keys - end_key, *rest);
    }
    return squares_around_mean(all_keys, sums.sum, sums.squares);
  }
};

// The sum of a column's squares over the pieces of a block of Q; `squares`: [pieces, d] from the column on.
[[nodiscard]] __device__ inline float sum_of_pieces(const float* squares, int pieces, int head_dim) {
  float sum = *squares;
  for (int first = 1; first < pieces; first += kLoadsAhead) {
    float loaded[kLoadsAhead];
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      loaded[i] = first + i < pieces ? squares[(first + i) * head_dim] : 0;
    }
#pragma unroll
    for (const float square : loaded) {
      sum += square;
    }
  }
  return sum;
}

// How many columns come before the thread's: those of more energy, and of as much those to its left. Thread c has
// column c; `energies`: as many as threads, less than 0 where there is no column.
[[nodiscard]] __device__ inline int rank_of(float energy, const float* energies) {
  const auto count = [energies](int first, int end, auto comes_before) {
    float4 sum{};
#pragma unroll 2
    for (int j = first; j < end; ++j) {
      const float4 others = reinterpret_cast<const float4*>(energies)[j];
      sum.x += comes_before(others.x) ? 1.0F : 0.0F;
      sum.y += comes_before(others.y) ? 1.0F : 0.0F;
      sum.z += comes_before(others.z) ? 1.0F : 0.0F;
      sum.w += comes_before(others.w) ? 1.0F : 0.0F;
    }
    return static_cast<int>(sum.x + sum.y + (sum.z + sum.w));
  };
  const auto own = static_cast<int>(threadIdx.x / 32 * 8);  // fours of columns to the warp's left
  const int left = count(0, own, [energy](float other) { return other >= energy; });
  const int rest = count(own, static_cast<int>(blockDim.x / 4), [energy](float other) { return other > energy; });
  const unsigned equal = __match_any_sync(~0U, __float_as_uint(energy));  // of the warp's columns
  return left + rest + __popc(equal & ((1U << threadIdx.x % 32) - 1));
}

// Thread c has column c. A block of threads orders part_blocks blocks of Q of a head, one after another.
__global__ void __launch_bounds__(kMaxHeadDim, 1) order_blocks(const Arguments a) {
  alignas(16) __shared__ float s_energies[kMaxHeadDim];
  release_dependent();
  const auto column = static_cast<int>(threadIdx.x);
  const bool has_column = column < a.head_dim;
  const int read_column = has_column ? column : 0;
  const std::uint32_t head = blockIdx.x;
  const auto blocks = static_cast<int>(a.queries.blocks);
  const auto pieces = static_cast<int>(a.queries.pieces);
  int block = static_cast<int>(blockIdx.y) * a.part_blocks;
  const int end = min(block + a.part_blocks, blocks);
  const std::int64_t row = static_cast<std::int64_t>(head) * blocks + block;  // of the order
  const float* squares = a.squares + row * pieces * a.head_dim + read_column;
  std::int32_t* order = a.order + row * a.head_dim;
  const SpreadReader spreads(a, head / a.heads_per_kv, read_column);

  wait_for_inputs();
  int strips = 0;
  float spread = 0;
  for (; block < end; ++block) {
    const float square = sum_of_pieces(squares, pieces, a.head_dim);
    const int needed = block < a.queries.previous ? 0 : a.keys.strips_of(block);
    if (needed != strips) {
      strips = needed;
      spread = spreads.up_to(strips);
    }
    float energy = strips > 0 ? square * spread : 0;
    energy = !has_column ? -1 : isnan(energy) ? INFINITY : energy;
    s_energies[column] = energy;
    __syncthreads();
    if (const int rank = rank_of(energy, s_energies); has_column) {
      order[rank] = column;
    }
    __syncthreads();  // before the next block's energies
    squares += static_cast<std::int64_t>(pieces) * a.head_dim;
    order += a.head_dim;
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
  int read_threads, order_threads;
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
  const std::int64_t kv_heads = problem.batch * problem.heads_kv;
  Spread* runs = workspace.take<Spread>(kv_heads * keys.runs * d);
  Spread* strips = workspace.take<Spread>(keys.run_strips == 1 ? 0 : kv_heads * keys.strips * d);
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t part_blocks = std::max<std::int64_t>(1, heads * queries.blocks / kOrderGrid);
  const std::int64_t parts = common::ceil_div(queries.blocks, part_blocks);
  const std::int64_t width = common::ceil_div(d, 32) * 32;
  const Arguments arguments{queries,
                            keys,
                            static_cast<int>(d),
                            warps.tiles,
                            warps.groups,
                            static_cast<int>(problem.heads_q / problem.heads_kv),
                            static_cast<int>(part_blocks),
                            squares,
                            runs,
                            strips,
                            tensors.order};
  return {arguments,
          warps.count() * 32,
          static_cast<int>(width),
          dim3(static_cast<unsigned>(queries.count + keys.count)),
          dim3(static_cast<unsigned>(heads), static_cast<unsigned>(parts)),
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
    launch_early(read_tensors<T, kVector>, plan.read_grid, plan.read_threads, 0, execution.stream, plan.arguments);
  });
  launch_early(order_blocks, plan.order_grid, plan.order_threads, 0, execution.stream, plan.arguments);
}

void run_read_only(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                   const Execution& execution) {
  const Plan plan = plan_of(problem, grouping, tensors, nullptr);
  if (plan.arguments.queries.count == 0) {
    return;
  }
  grouping::with_loads(problem.dtype, plan.aligned, [&]<class T, int kVector>() {
    launch(read_only<T, kVector>, plan.read_grid, plan.read_threads, 0, execution.stream, plan.arguments);
  });
}

void run_read_and_wait(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                       const Execution& execution) {
  run_read_only(problem, grouping, tensors, execution);
  launch_early(only_wait, dim3(1), 32, 0, execution.stream, plan_of(problem, grouping, tensors, nullptr).arguments);
}

}  // namespace distr::cuda::energy
