// SPDX-License-Identifier: Apache-2.0
// Backward on the CPU (method, 3; the order is a constant). A task owns 128 keys of a KV head and meets the tiles of
// queries one by one, so that dK and dV stay in its cache and nothing of size N x N exists.
//
//   D = rowsum(dO * O) - dLSE                               of all rows, before the tasks
//   for each tile of queries of the KV head's query heads, that see some of the keys:
//     P   = exp(cap(q_hat k_hat^T scale) + mask - LSE)
//     dS  = P * (dO V^T - D), times the slope of the cap where scores are capped
//     dV^T += dO^T P        dk_hat^T = scale q_hat^T dS, spread over the columns of dK^T
//     dq_hat += scale dS k_hat                              by all tasks of the head, in the order of their keys
//   dQ = dq_hat spread over its columns                     by the last task that adds to it
//
// A tile's counter says how many tasks have added to its dq_hat; a task waits for its turn. Tasks are taken in the
// order of their keys, so the one that is waited for is always under way: no deadlock, and the same bits for any number
// of threads. Packed sequences are taken one after the other.
#include <algorithm>
#include <array>

#include "common/block.h"
#include "common/parallel.h"
#include "common/sequence.h"
#include "cpu/backward_tiling.h"
#include "cpu/entries.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include <hwy/foreach_target.h>
// After foreach_target:
#include <hwy/highway.h>

#include "cpu/backward_tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

void backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
              const Execution& execution, Products products) {
  with_arithmetic(
      problem.dtype, products, [&]<class T, class Arithmetic>(std::type_identity<T>, std::type_identity<Arithmetic>) {
        for (std::int64_t b = 0; b < (common::has_lengths(problem) ? problem.batch : 1); ++b) {
          common::with_sequence(
              problem, tensors, b, [&](const Problem& own, const BackwardTensors& from, std::int64_t /*b*/) {
                backward_of<T, Arithmetic>(own, grouping, BackwardTiling(own, grouping), from, execution);
              });
        }
      });
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace distr::cpu {

HWY_EXPORT(backward);

namespace {

KernelPlan<BackwardTensors> plan(const Problem& problem, const Grouping& grouping, const Execution& execution,
                                 Products products) {
  const Problem longest = common::longest_sequence(problem);
  const BackwardTiling tiling(longest, grouping);
  const std::int64_t tasks = std::max(tiling.num_tasks(), tiling.num_mask_tasks());
  const std::int64_t threads = useful_threads(execution.threads, tasks);
  KernelPlan<BackwardTensors> plan = plan_of<BackwardTensors>(problem, grouping, tiling.num_tasks(), threads);
  plan.workspace.add("dQ's sums, D and turns", bytes_of(tiling.shared_floats()));
  plan.workspace.add("tiles of each thread", bytes_of(threads * BackwardScratch(problem, grouping, products).total));
  plan.run = [&problem, &grouping, products](const BackwardTensors& tensors, const Execution& with) {
    HWY_DYNAMIC_DISPATCH(backward)(problem, grouping, tensors, with, products);
  };
  return plan;
}

}  // namespace

KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping,
                                          const Execution& execution) {
  return plan(problem, grouping, execution, Products::of_floats);
}

KernelPlan<BackwardTensors> plan_backward_bf16(const Problem& problem, const Grouping& grouping,
                                               const Execution& execution) {
  return plan(problem, grouping, execution, products_of_bf16());
}

}  // namespace distr::cpu
#endif
