// SPDX-License-Identifier: Apache-2.0
// Kernels that read what a grouping kernel reads, with its grid and loads, and do nothing else: the time that it is
// held against. They write nothing.
#include "common/near.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/grouping.h"
#include "cuda/grouping_loads.cuh"
#include "cuda/grouping_moments.cuh"
#include "gpu/ablations.h"

namespace distr::test {
namespace {

namespace grouping = cuda::grouping;

struct Reads {
  grouping::QueryPieces queries;
  cuda::energy::KeyStrips keys;  // of `energy`
  int head_dim, groups;
  std::int32_t* order;
};

// Reads these rows; 0 if a thread has seen nothing but zeros.
template <class T, int kVector>
__device__ std::uint32_t read(const grouping::RowSpan& rows, const grouping::Lane& lane) {
  using Round = grouping::Round<T, kVector>;
  std::uint32_t seen = 0;
  for (int n = 0; n < rows.count; n += Round::rows(lane)) {
    Round round;
    round.load(rows, n, lane);
#pragma unroll
    for (const auto& chunk : round.words) {
#pragma unroll
      for (const auto& row : chunk) {
#pragma unroll
        for (const std::uint32_t word : row) {
          seen |= word;
        }
      }
    }
  }
  return seen;
}

// The compiler must keep the loads for this, which is never true.
__device__ void keep(const Reads& reads, std::uint32_t seen) {
  if (reads.queries.count == 0) {
    reads.order[threadIdx.x] = static_cast<std::int32_t>(seen);
  }
}

// lsh::order_blocks: a thread block takes piece after piece.
template <class T, int kVector>
__global__ void __launch_bounds__(grouping::kMaxThreads, 2) read_pieces(const Reads reads) {
  const grouping::Lane lane(reads.groups, reads.head_dim);
  std::uint32_t seen = 0;
  for (std::uint32_t piece = blockIdx.x; piece < reads.queries.count; piece += gridDim.x) {
    seen |= read<T, kVector>(reads.queries.at(piece), lane);
  }
  keep(reads, seen);
}

// energy::read_tensors: a run of keys or a piece of Q a thread block.
template <class T, int kVector>
__global__ void __launch_bounds__(grouping::kMaxThreads, 2) read_runs(const Reads reads) {
  const grouping::Lane lane(reads.groups, reads.head_dim);
  const auto runs = static_cast<std::uint32_t>(reads.keys.count);
  grouping::RowSpan rows;
  if (blockIdx.x < runs) {
    const int first = static_cast<int>(blockIdx.x % reads.keys.runs) * reads.keys.run_strips;
    const int end = min(first + reads.keys.run_strips, reads.keys.strips);
    rows = reads.keys.keys(blockIdx.x / reads.keys.runs, reads.keys.start(first), reads.keys.start(end));
  } else {
    rows = reads.queries.at(blockIdx.x - runs);
  }
  keep(reads, read<T, kVector>(rows, lane));
}

__global__ void only_wait(int /*unused*/) { cuda::wait_on_dependent_grids(); }

// `plan` with a launch of kernel_of() in the place of its first launch, with the same grid.
template <class KernelOf>
KernelPlan<GroupingTensors> reading(KernelPlan<GroupingTensors> plan, const Problem& problem, const Grouping& of,
                                    const KernelOf& kernel_of) {
  const grouping::QueryPieces queries(problem, of);
  const Reads reads{queries, cuda::energy::KeyStrips(problem, queries, common::has_key_means(of)),
                    static_cast<int>(problem.head_dim), grouping::Warps(problem.head_dim).groups, nullptr};
  const std::int64_t row_bytes = problem.head_dim * static_cast<std::int64_t>(size_of(problem.dtype));
  const bool aligned_rows = grouping::has_aligned_rows(queries.strides, problem.batch, problem.heads_q, row_bytes) &&
                            grouping::has_aligned_rows(reads.keys.strides, problem.batch, problem.heads_kv, row_bytes);
  plan.run = [=, dtype = problem.dtype, shape = plan.launches.front()](const GroupingTensors& tensors,
                                                                       const Execution& execution) {
    Reads own = reads;
    own.queries.q = static_cast<const std::byte*>(tensors.q);
    own.keys.k = static_cast<const std::byte*>(tensors.k);
    own.order = tensors.order;
    const bool aligned = aligned_rows && grouping::is_aligned(tensors.q) && grouping::is_aligned(tensors.k);
    grouping::with_loads(dtype, aligned, [&]<class T, int kVector>() {
      cuda::launch(kernel_of.template operator()<T, kVector>(), dim3(static_cast<unsigned>(shape.blocks)),
                   static_cast<int>(shape.threads), static_cast<std::size_t>(shape.shared_bytes), execution.stream,
                   own);
    });
  };
  return plan;
}

KernelPlan<GroupingTensors> read_as_lsh(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  return reading(cuda::lsh::plan(problem, grouping, execution), problem, grouping,
                 [&]<class T, int kVector>() { return read_pieces<T, kVector>; });
}

KernelPlan<GroupingTensors> read_as_energy(const Problem& problem, const Grouping& grouping,
                                           const Execution& execution) {
  return reading(cuda::energy::plan(problem, grouping, execution), problem, grouping,
                 [&]<class T, int kVector>() { return read_runs<T, kVector>; });
}

KernelPlan<GroupingTensors> read_as_energy_and_wait(const Problem& problem, const Grouping& grouping,
                                                    const Execution& execution) {
  KernelPlan<GroupingTensors> plan = read_as_energy(problem, grouping, execution);
  plan.run = [read = plan.run](const GroupingTensors& tensors, const Execution& with) {
    read(tensors, with);
    cuda::launch_dependent(only_wait, dim3(1), 32, 0, with.stream, 0);
  };
  return plan;
}

}  // namespace

std::optional<GroupingKernel> reading_ablation(const GroupingKernel& kernel) {
  GroupingKernel ablation = kernel;
  const std::string name = kernel.name;
  if (name == "cuda/lsh") {
    ablation.plan = read_as_lsh;
  } else if (name == "cuda/energy") {
    ablation.plan = read_as_energy;
  } else {
    return std::nullopt;
  }
  return ablation;
}

std::optional<GroupingKernel> launching_ablation(const GroupingKernel& kernel) {
  if (kernel.name != std::string("cuda/energy")) {
    return std::nullopt;
  }
  GroupingKernel ablation = kernel;
  ablation.plan = read_as_energy_and_wait;
  return ablation;
}

}  // namespace distr::test
