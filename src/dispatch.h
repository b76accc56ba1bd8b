// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a call: the backends' entries in order of preference.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "common/near.h"
#include "disabled_kernels.h"
#include "kernel.h"

namespace distr {

struct Resolved {
  Grouping grouping;   // without `automatic` values
  std::string choice;  // one sentence: what and why
};

// Replaces the strategy `automatic` by what pays on `device` (method, 2, "Strategy auto"), and where orders come from
// by what a causal call needs (method, 2, "Causal attention and the order").
Resolved resolve(const Problem& problem, const Grouping& grouping, Device device);

// What an operation is called by its tensors, and where a backend has its kernels.
template <class Tensors>
struct OperationOf;
template <>
struct OperationOf<GroupingTensors> {
  static constexpr Operation kOperation = Operation::grouping;
  static constexpr auto kEntries = &Backend::grouping;
};
template <>
struct OperationOf<ForwardTensors> {
  static constexpr Operation kOperation = Operation::forward;
  static constexpr auto kEntries = &Backend::forward;
};
template <>
struct OperationOf<BackwardTensors> {
  static constexpr Operation kOperation = Operation::backward;
  static constexpr auto kEntries = &Backend::backward;
};

// Calls function(std::type_identity<Tensors>{}) with the tensors of an operation.
template <class Function>
decltype(auto) with_tensors(Operation operation, const Function& function) {
  switch (operation) {
    case Operation::grouping:
      return function(std::type_identity<GroupingTensors>{});
    case Operation::forward:
      return function(std::type_identity<ForwardTensors>{});
    case Operation::backward:
      break;
  }
  return function(std::type_identity<BackwardTensors>{});
}

// Visits the kernels of one operation in order of preference: the reference serves what no other kernel does.
template <class Tensors, class Visitor>
void for_each_kernel(const Visitor& visit) {
  for (const Backend& backend : {cuda_backend(), cpu_backend(), reference_backend()}) {
    for (const auto& entry : backend.*OperationOf<Tensors>::kEntries) {
      visit(entry);
    }
  }
}

template <class Tensors>
KernelInfo info_of(const KernelEntry<Tensors>& entry) {
  return {entry.name, OperationOf<Tensors>::kOperation, entry.device, entry.deterministic};
}

// Why the kernel does not serve a call on its device; empty: it does.
template <class Tensors>
std::string reason_against(const KernelEntry<Tensors>& entry, const Problem& problem, const Grouping& grouping,
                           bool deterministic, const DisabledKernels& disabled) {
  if (disabled.has(entry.name)) {
    return "is disabled by DISTR_DISABLE_KERNELS";
  }
  if (OperationOf<Tensors>::kOperation == Operation::grouping && !is_exact(grouping) &&
      traits(grouping.strategy).order == OrderSource::caller && !common::has_key_means(grouping)) {
    return "has nothing to compute, as the caller brings the order";
  }
  if (OperationOf<Tensors>::kOperation == Operation::grouping && grouping.part.has_value()) {
    return "has no orders of a part, which are the whole's";
  }
  if (OperationOf<Tensors>::kOperation == Operation::backward && grouping.skip > 0) {
    return "has no gradients of skipped keys";
  }
  if (OperationOf<Tensors>::kOperation == Operation::backward && problem.key_lengths) {
    return "has no gradients with key lengths that are data";
  }
  std::string reason = entry.supports(problem, grouping);
  return reason.empty() && deterministic && !entry.deterministic
             ? "sums in an order that changes from run to run, and the call is to be deterministic"
             : reason;
}

template <class Tensors>
std::vector<KernelVerdict> judge(const Problem& problem, const Grouping& grouping, Device device, bool deterministic) {
  const DisabledKernels disabled;
  disabled.validate();
  std::vector<KernelVerdict> verdicts;
  for_each_kernel<Tensors>([&](const KernelEntry<Tensors>& entry) {
    if (entry.device == device) {
      verdicts.push_back({info_of(entry), reason_against(entry, problem, grouping, deterministic, disabled)});
    }
  });
  return verdicts;
}

}  // namespace distr
