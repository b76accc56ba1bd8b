// SPDX-License-Identifier: Apache-2.0
// Forward on the CPU: O = softmax(cap(scale * q_hat k_hat^T) + mask) V, one tile of queries a task, one tile of keys at
// a time, so that nothing of size N x N exists.
//
//   for each tile of up to 256 queries (whole blocks, or a part of one):
//     q_hat = estimate(Q)                                           once; by the groups of each block
//     for each tile of 128 keys that some of its queries see:
//       K^T, V to words (floats, or pairs of bf16) in the cache
//       for each block in the tile:  k_hat^T = sums of rows of K^T  or the kept rows
//         for each few of its rows:  S = q_hat k_hat^T;  P = online softmax of S, row by row;  O += P V
//     O /= row sums
//     where O is not finite:  again, with V so small that no sum overflows
//
// Near keys (method, 8): tiles of keys that are near to some rows come first, with all columns for these rows, then
// those that are far. What the means of the keys add to far scores is one more column of q_hat, whose k_hat is 1. With
// `skip` the far scores of 64 rows are taken first, and 64 keys whose scores stay below every row's bound have no
// softmax and no P V.
//
// Few tiles and many keys: several tasks share the keys of a tile, and their partial results are merged in order; not
// with `skip`, whose bounds need all near keys. Where lengths are data, the longest there may be make the tasks, and a
// task works on its batch entry's own problem (common/sequence.h).
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "common/block.h"
#include "common/mask.h"
#include "common/parallel.h"
#include "common/sequence.h"
#include "cpu/entries.h"
#include "cpu/tiling.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include <hwy/foreach_target.h>
// After foreach_target:
#include <hwy/highway.h>

#include "cpu/forward_tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

void forward(const Problem& problem, const Grouping& grouping, const ForwardTiling& tiling,
             const ForwardTensors& tensors, const Execution& execution, Products products) {
  with_arithmetic(problem.dtype, products,
                  [&]<class T, class Arithmetic>(std::type_identity<T>, std::type_identity<Arithmetic>) {
                    forward_of<T, Arithmetic>(problem, grouping, tiling, tensors, execution);
                  });
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace distr::cpu {

HWY_EXPORT(forward);
HWY_EXPORT(has_pairs);

namespace {

// The rows of a task: those that are asked for, or many, unless threads would go without.
std::int64_t task_rows(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  for (const std::int64_t rows : {kTileQueries, kTaskQueries}) {
    if (execution.tile_rows == rows) {
      return rows;
    }
  }
  const std::int64_t wanted = std::max<std::int64_t>(kEnoughTasks, kTasksPerThread * execution.threads);
  return ForwardTiling(problem, grouping, kTaskQueries).num_tiles() < wanted ? kTileQueries : kTaskQueries;
}

KernelPlan<ForwardTensors> plan(const Problem& problem, const Grouping& grouping, const Execution& execution,
                                Products products) {
  const std::int64_t rows = task_rows(problem, grouping, execution);
  const ForwardTiling tiling(problem, grouping, rows);
  const std::int64_t threads = useful_threads(execution.threads, tiling.num_tasks());
  KernelPlan<ForwardTensors> plan = plan_of<ForwardTensors>(problem, grouping, tiling.num_tasks(), threads, rows);
  plan.tiles.push_back(plan.tiles.front());
  plan.tiles.back().rows = rows == kTaskQueries ? kTileQueries : kTaskQueries;
  plan.workspace.add("tiles of each thread", bytes_of(threads * ForwardScratch(problem, grouping, products).total));
  plan.workspace.add("partial sums", tiling.splits() == 1 ? 0 : bytes_of(tiling.num_tasks() * tiling.partial_floats()));
  plan.run = [&problem, &grouping, tiling, products](const ForwardTensors& tensors, const Execution& with) {
    HWY_DYNAMIC_DISPATCH(forward)(problem, grouping, tiling, tensors, with, products);
  };
  return plan;
}

}  // namespace

KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  return plan(problem, grouping, execution, Products::of_floats);
}

KernelPlan<ForwardTensors> plan_forward_bf16(const Problem& problem, const Grouping& grouping,
                                             const Execution& execution) {
  return plan(problem, grouping, execution, products_of_bf16());
}

bool target_has_pairs() { return HWY_DYNAMIC_DISPATCH(has_pairs)(); }

}  // namespace distr::cpu
#endif
