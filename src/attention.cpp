// SPDX-License-Identifier: Apache-2.0
// The operations: each makes a plan and runs it.
#include "distr/attention.h"

#include "distr/plan.h"

namespace distr {
inline namespace v0 {

void make_grouping(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                   const Execution& execution) {
  plan(Operation::grouping, problem, grouping, execution).run(tensors);
}

void forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
             const Execution& execution) {
  plan(Operation::forward, problem, grouping, execution).run(tensors);
}

void backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
              const Execution& execution) {
  plan(Operation::backward, problem, grouping, execution).run(tensors);
}

std::size_t workspace_bytes(Operation operation, const Problem& problem, const Grouping& grouping,
                            const Execution& execution) {
  return plan(operation, problem, grouping, execution).workspace_bytes();
}

}  // namespace v0
}  // namespace distr
