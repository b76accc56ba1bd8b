// SPDX-License-Identifier: Apache-2.0
// Strategy `auto`: exact attention; where a group size is asked for and an approximation pays, the strategy that
// measures best. What pays on a device its backend says (cpu/heuristics.h, cuda/heuristics.h), and what pays on every
// device common/heuristics.h.
#include <string>

#include "common/heuristics.h"
#include "decisions.h"
#include "dispatch.h"

namespace distr {
namespace {

Advice device_advice(const Problem& problem, const Grouping& grouping, Device device) {
  switch (device) {
    case Device::cpu:
      return cpu_advice(problem, grouping);
    case Device::cuda:
      break;
  }
  return cuda_advice(problem, grouping);
}

// What holds on every device, before and after what its backend says.
Advice advice(const Problem& problem, const Grouping& grouping, Device device) {
  if (grouping.group_size == 1) {
    return {false, "as the group size is 1 (auto approximates only where a larger one is asked for)"};
  }
  if (grouping.order_from == OrderFrom::previous && grouping.block >= problem.seq_q) {
    return {false, "as the first block is where orders come from the block before, and there is no other"};
  }
  if (problem.dtype == DType::f64) {
    return {false, "as the float64 reference gains nothing from an approximation"};
  }
  Advice of_device = device_advice(problem, grouping, device);
  if (!of_device.pays) {
    return of_device;
  }
  if (grouping.block < common::kShortestBlock) {
    return {false, "as blocks of " + std::to_string(grouping.block) +
                       " rows share too little work for an approximation to pay (from " +
                       std::to_string(common::kShortestBlock) + " on they do)"};
  }
  if (problem.head_dim_v > common::kWidestValues * problem.head_dim) {
    return {false,
            "as nearly all work is the product with V, whose head_dim_v is " + std::to_string(problem.head_dim_v)};
  }
  return of_device;
}

}  // namespace

Resolved resolve(const Problem& problem, const Grouping& grouping, Device device) {
  count(decision_counts.resolved);
  if (grouping.strategy != Strategy::automatic) {
    const bool nothing_to_group = grouping.strategy != Strategy::exact && grouping.group_size == 1;
    return {grouping, nothing_to_group ? "exact, as the group size is 1" : "as asked for"};
  }
  const Advice found = advice(problem, grouping, device);
  Resolved result{grouping, {}};
  result.grouping.strategy = found.pays ? Strategy::energy : Strategy::exact;
  result.choice = std::string(traits(result.grouping.strategy).name) + ", " + found.why;
  return result;
}

}  // namespace distr
