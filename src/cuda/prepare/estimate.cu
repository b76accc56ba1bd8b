// SPDX-License-Identifier: Apache-2.0
// x_hat[row, g] = the sum, the mean or the first of x[row, c] over the columns c of group g, in fp32; or, spread,
// x_hat[row, c], the same for all columns c of the group, and 0 where c has no group. And of rows of Q what
// far scores keep of the columns that x_hat drops (DroppedScores).
//
// A block takes rows of a query head of Q or of K that have one order, 64 at a time: they are staged in shared memory,
// 16 bytes a thread, with a column of zeros behind the last. Then a thread makes the same two neighbouring columns of
// one row after another, so it knows its members' places from the start; those that a smaller group lacks are in the
// column of zeros. Bound by memory: x is read once for each query head, x_hat written once.
#include "cuda/prepare/estimate.h"

#include <algorithm>
#include <bit>

#include "common/element.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/heuristics.h"
#include "cuda/near.cuh"
#include "cuda/tile.cuh"

namespace distr::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64;
constexpr int kMaxColumns = 128;
constexpr int kPitch = kMaxColumns + kChunk;  // elements of a row in shared memory
constexpr int kMaxKnown = 8;                  // members whose places a thread keeps in registers

using Job = Estimates::Job;
using Arguments = Estimates::Arguments;

template <class T>
struct Shared {
  alignas(16) T x[kRows][kPitch];
  std::int32_t order[kMaxColumns];
  std::uint32_t place[kMaxColumns];  // of a column in the order
};

// A column of x_hat: of its group the first place in the order, how many columns count, and their factor.
struct Column {
  unsigned begin, taken;
  float factor;

  __device__ Column(const Job& job, const Arguments& a, const std::uint32_t* place, unsigned column) {
    const bool is_valid = column < job.estimates;
    const unsigned group = is_valid && job.spread ? place[column] / a.members : column;
    begin = group * a.members;
    const unsigned size = is_valid && group < a.groups ? min(a.members, job.columns - begin) : 0;
    taken = job.kind == Estimate::first ? min(size, 1U) : size;
    factor = job.kind == Estimate::mean && size > 1 ? job.scale / static_cast<float>(size) : job.scale;
  }
};

// What a thread makes: two neighbouring columns of every step-th row. kMembers: at least so many as a group has; 0: any
// number.
template <class T, int kMembers>
class ColumnPair {
 public:
  __device__ ColumnPair(const Job& job, const Arguments& a, const Shared<T>& shared)
      : pairs_(job.pairs),
        pair_(threadIdx.x % job.pairs),
        step_(kThreads / job.pairs),
        columns_{{job, a, shared.place, 2 * pair_}, {job, a, shared.place, 2 * pair_ + 1}} {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < kMembers; ++m) {
        places_[i][m] = static_cast<unsigned>(m) < columns_[i].taken
                            ? static_cast<unsigned>(shared.order[columns_[i].begin + static_cast<unsigned>(m)])
                            : kMaxColumns;
      }
    }
  }

  // Of the first `rows` rows in shared memory. to: x_hat of the first.
  __device__ void make(const Shared<T>& shared, unsigned rows, std::uint32_t* to) const {
    const unsigned first = threadIdx.x / pairs_;
    if (first >= step_) {  // what is left of the threads
      return;
    }
#pragma unroll 4
    for (unsigned row = first; row < rows; row += step_) {
      to[row * pairs_ + pair_] = ptx::pack(value(shared, row, 0), value(shared, row, 1), T{});
    }
  }

 private:
  [[nodiscard]] __device__ float value(const Shared<T>& shared, unsigned row, int i) const {
    float sum = 0;
    if constexpr (kMembers == 0) {
      for (unsigned m = 0; m < columns_[i].taken; ++m) {
        sum += static_cast<float>(shared.x[row][shared.order[columns_[i].begin + m]]);
      }
    } else {
      sum = static_cast<float>(shared.x[row][places_[i][0]]);
#pragma unroll
      for (int m = 1; m < kMembers; ++m) {
        sum += static_cast<float>(shared.x[row][places_[i][m]]);
      }
    }
    return sum * columns_[i].factor;
  }

  unsigned pairs_, pair_, step_;
  Column columns_[2];
  unsigned places_[2][kMembers == 0 ? 1 : kMembers];
};

// Of a head's rows from `begin` to end - 1, by all threads. first: of the head's.
__device__ inline void clear_rows_without_far_keys(const DroppedScores& of, std::int64_t first, unsigned begin,
                                                   unsigned end) {
  for (unsigned row = begin + threadIdx.x; row < end; row += kThreads) {
    if (near_tiles(of.problem, row, visible_keys(of.problem, row)).far_count() == 0) {
      of.dropped[first + row] = 0;
    }
  }
}

// A lane has every 32nd of the dropped columns, and a warp an eighth of the rows in shared memory.
template <class T>
class DroppedColumns {
 public:
  __device__ DroppedColumns(const Job& job, const Arguments& a, const Shared<T>& shared, unsigned head, unsigned block)
      : dropped_(a.dropped.dropped + std::int64_t{head} * job.head_rows) {
    const DroppedScores& of = a.dropped;
    const unsigned head_kv = head / a.heads_q * of.heads_kv + head % a.heads_q / (a.heads_q / of.heads_kv);
    const float* const means =
        of.key_means + (std::int64_t{head_kv} * of.means + (of.means == 1 ? 0 : block)) * job.columns;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const unsigned position = a.groups + static_cast<unsigned>(i) * 32 + threadIdx.x % 32;
      columns_[i] = position < job.columns ? shared.order[position] : -1;
      means_[i] = columns_[i] < 0 ? 0.0F : means[columns_[i]];
    }
  }

  // Of the first `rows` rows in shared memory, which are those from `first` on.
  __device__ void make(const Shared<T>& shared, unsigned first, unsigned rows) const {
    const unsigned from = threadIdx.x / 32 * kOfWarp;
    float sums[kOfWarp] = {};
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (columns_[i] >= 0) {
#pragma unroll
        for (unsigned j = 0; j < kOfWarp; ++j) {
          sums[j] = fmaf(static_cast<float>(shared.x[from + j][columns_[i]]), means_[i], sums[j]);
        }
      }
    }
    // With each of the first steps half of the rows go to the other lane, until there is one.
    unsigned row = from;
#pragma unroll
    for (unsigned left = kOfWarp / 2, other = 16; other > 0; left /= 2, other /= 2) {
      const bool has_upper = left > 0 && (threadIdx.x & other) != 0;
      row += has_upper ? left : 0;
#pragma unroll
      for (unsigned j = 0; j < (left > 0 ? left : 1); ++j) {
        const float kept = has_upper ? sums[j + left] : sums[j];
        const float given = left == 0 || has_upper ? sums[j] : sums[j + left];
        sums[j] = kept + __shfl_xor_sync(~0U, given, other);
      }
    }
    if (threadIdx.x % (32 / kOfWarp) == 0 && row < rows) {
      dropped_[first + row] = sums[0];
    }
  }

 private:
  static constexpr int kOfLane = kMaxColumns / 32;
  static constexpr unsigned kOfWarp = kRows / (kThreads / 32);

  float* dropped_;
  int columns_[kOfLane];
  float means_[kOfLane];
};

template <class T, int kMembers>
__global__ void __launch_bounds__(kThreads) estimate_kernel(const __grid_constant__ Arguments a) {
  __shared__ Shared<T> shared;
  launch_dependent_grids();
  const bool is_second = blockIdx.x >= a.jobs[0].grid;
  const Job& job = a.jobs[is_second ? 1 : 0];
  const unsigned index = blockIdx.x - (is_second ? a.jobs[0].grid : 0);
  const unsigned head = index / job.runs;  // of batch * heads_q
  const unsigned begin = job.first_row + index % job.runs * job.run_rows;
  const unsigned end = min(begin + job.run_rows, job.head_rows);
  const T* const from = static_cast<const T*>(job.x) + head / a.heads_q * job.strides.batch +
                        head % a.heads_q / (a.heads_q / job.heads) * job.strides.head;
  std::uint32_t* const to = job.to + std::int64_t{head} * job.head_rows * job.pairs;
  const auto load = [&](unsigned first) {
    const unsigned chunks = min(end - first, static_cast<unsigned>(kRows)) << job.chunk_bits;
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < chunks; i += kThreads) {
      const unsigned row = i >> job.chunk_bits;
      const unsigned column = (i & ((1U << job.chunk_bits) - 1)) * kChunk;
      if (column < job.columns) {  // rows are padded to whole chunks
        *reinterpret_cast<uint4*>(&shared.x[row][column]) =
            *reinterpret_cast<const uint4*>(from + (first + row) * job.strides.row + column);
      }
    }
  };

  if (threadIdx.x < kRows) {
    shared.x[threadIdx.x][kMaxColumns] = T(0.0F);
  }
  wait_on_dependent_grids();
  if (threadIdx.x < job.columns) {
    const std::int32_t column =
        a.order[(std::int64_t{head} * job.blocks + begin / job.block) * job.columns + threadIdx.x];
    shared.order[threadIdx.x] = column;
    if (job.spread) {
      shared.place[column] = threadIdx.x;
    }
  }
  load(begin);
  __syncthreads();
  const ColumnPair<T, kMembers> pair(job, a, shared);
  const auto make_all = [&](const auto& make_dropped) {
    for (unsigned first = begin; first < end; first += kRows) {
      if (first > begin) {
        __syncthreads();  // the rows before have been read
        load(first);
        __syncthreads();
      }
      const unsigned rows = min(end - first, static_cast<unsigned>(kRows));
      pair.make(shared, rows, to + std::int64_t{first} * job.pairs);
      make_dropped(first, rows);
    }
  };
  if constexpr (kMembers == 1) {
    if (!is_second && a.dropped.dropped != nullptr) {
      const DroppedColumns<T> dropped(job, a, shared, head, begin / job.block);
      make_all([&](unsigned first, unsigned rows) { dropped.make(shared, first, rows); });
      if (a.dropped.only_far) {
        __syncthreads();  // they are there
        clear_rows_without_far_keys(a.dropped, std::int64_t{head} * job.head_rows, begin, end);
      }
      return;
    }
  }
  make_all([](unsigned, unsigned) {});
}

[[nodiscard]] Job job_of(const Groups& groups, const Estimation& e) {
  const auto number = [](std::int64_t n) { return static_cast<unsigned>(n); };
  const Extent& extent = e.extent;
  const std::int64_t heads = extent.batch * groups.heads_q;
  const std::int64_t rows = extent.rows - e.first_row;
  const std::int64_t run_rows =
      kRows *
      estimated_tiles(heads * rows / kRows, e.block >= extent.rows ? 0 : e.block / kRows, device_properties().num_sms);
  const std::int64_t runs = common::ceil_div(rows, run_rows);
  return {nullptr,
          e.strides,
          e.kind,
          number(extent.rows),
          number(extent.heads),
          number(extent.columns),
          number(std::min(e.block, extent.rows)),
          number(common::ceil_div(extent.rows, e.block)),
          number(e.first_row),
          number(e.columns(groups)),
          number(packed_columns(e.columns(groups)) / 2),
          e.spread,
          1,
          static_cast<unsigned>(std::bit_width(number(common::ceil_div(extent.columns, kChunk) - 1))),
          number(run_rows),
          number(runs),
          number(heads * runs),
          nullptr};
}

template <class T>
[[nodiscard]] auto kernel_for(unsigned members) {
  return members == 1           ? &estimate_kernel<T, 1>
         : members == 2         ? &estimate_kernel<T, 2>
         : members <= 4         ? &estimate_kernel<T, 4>
         : members <= kMaxKnown ? &estimate_kernel<T, kMaxKnown>
                                : &estimate_kernel<T, 0>;
}

}  // namespace

Estimates::Estimates(const Groups& groups, std::span<const Estimation> estimations)
    : arguments_{{},
                 nullptr,
                 static_cast<unsigned>(groups.heads_q),
                 static_cast<unsigned>(groups.members),
                 static_cast<unsigned>(groups.count),
                 {}},
      kernel_(groups.dtype == DType::f16 ? kernel_for<__half>(arguments_.members)
                                         : kernel_for<__nv_bfloat16>(arguments_.members)) {
  std::transform(estimations.begin(), estimations.end(), arguments_.jobs,
                 [&](const Estimation& e) { return job_of(groups, e); });
}

void Estimates::make(const std::int32_t* order, std::span<const Tensors> tensors, const DroppedScores& dropped,
                     void* stream) const {
  Arguments a = arguments_;
  a.order = order;
  a.dropped = dropped;
  for (std::size_t n = 0; n < tensors.size(); ++n) {
    a.jobs[n].x = tensors[n].x;
    a.jobs[n].scale = tensors[n].scale;
    a.jobs[n].to = static_cast<std::uint32_t*>(tensors[n].x_hat);
  }
  launch_dependent(kernel_, dim3(a.jobs[0].grid + a.jobs[1].grid), kThreads, 0, stream, a);
}

}  // namespace distr::cuda
