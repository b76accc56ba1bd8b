// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "check.h"
#include "common/parallel.h"
#include "left_out.h"

namespace distr {
namespace {

// In order of preference: the reference serves what no other kernel does.
std::array<Backend, 3> backends() { return {cuda_backend(), cpu_backend(), reference_backend()}; }

const char* name_of(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

template <class Tensors>
struct Traits;
template <>
struct Traits<GroupingTensors> {
  static constexpr Operation kOperation = Operation::grouping;
  static constexpr auto kEntries = &Backend::grouping;
};
template <>
struct Traits<ForwardTensors> {
  static constexpr Operation kOperation = Operation::forward;
  static constexpr auto kEntries = &Backend::forward;
};
template <>
struct Traits<BackwardTensors> {
  static constexpr Operation kOperation = Operation::backward;
  static constexpr auto kEntries = &Backend::backward;
};

// Visits the kernels of one operation in order of preference.
template <class Tensors, class Visitor>
void for_each_kernel(Visitor visit) {
  for (const Backend& backend : backends()) {
    for (const auto& entry : backend.*Traits<Tensors>::kEntries) {
      visit(entry);
    }
  }
}

template <class Tensors>
KernelInfo info_of(const KernelEntry<Tensors>& entry) {
  return {entry.name, Traits<Tensors>::kOperation, entry.device, entry.deterministic};
}

// Why the kernel does not serve a call on its device; empty: it does.
template <class Tensors>
std::string reason_against(const KernelEntry<Tensors>& entry, const Problem& problem, const Grouping& grouping,
                           bool deterministic, const LeftOut& left_out) {
  if (left_out.has(entry.name)) {
    return "is left out by DISTR_LEAVE_OUT";
  }
  std::string reason = entry.supports(problem, grouping);
  return reason.empty() && deterministic && !entry.deterministic
             ? "sums in an order that changes from run to run, and the call is to be deterministic"
             : reason;
}

template <class Tensors>
std::vector<KernelVerdict> judge(const Problem& problem, const Grouping& grouping, Device device, bool deterministic) {
  const LeftOut left_out;
  left_out.validate();
  std::vector<KernelVerdict> verdicts;
  for_each_kernel<Tensors>([&](const KernelEntry<Tensors>& entry) {
    if (entry.device == device) {
      verdicts.push_back({info_of(entry), reason_against(entry, problem, grouping, deterministic, left_out)});
    }
  });
  return verdicts;
}

template <class Tensors>
KernelEntry<Tensors> choose(const Problem& problem, const Grouping& grouping, Device device, bool deterministic) {
  const LeftOut left_out;
  left_out.validate();
  const KernelEntry<Tensors>* chosen = nullptr;
  for_each_kernel<Tensors>([&](const KernelEntry<Tensors>& entry) {
    if (chosen == nullptr && entry.device == device &&
        reason_against(entry, problem, grouping, deterministic, left_out).empty()) {
      chosen = &entry;
    }
  });
  if (chosen != nullptr) {
    return *chosen;
  }
  std::string message = std::string("no kernel on ") + name_of(device) + " serves this problem";
  for (const KernelVerdict& verdict : judge<Tensors>(problem, grouping, device, deterministic)) {
    message += "; " + verdict.kernel.name + ": " + verdict.reason;
  }
  std::string reason;
  if (device == Device::cuda && cuda_device_names(reason).empty()) {
    message += "; " + reason;
  }
  throw Error(Status::unsupported, message);
}

Execution with_threads(Execution execution) {
  if (execution.threads < 0) {
    throw Error(Status::invalid_argument,
                "threads is " + std::to_string(execution.threads) + "; allowed: 0 (all processors) and above");
  }
  if (execution.threads == 0) {
    execution.threads = common::available_processors();
  }
  return execution;
}

constexpr std::size_t kWorkspaceAlignment = 64;

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{kWorkspaceAlignment}); }
};

template <class Tensors>
void call(const Problem& problem, const Grouping& grouping, const Tensors& tensors, const Execution& execution) {
  validate(problem, grouping);
  const Grouping resolved = resolve(problem, grouping, execution.device).grouping;
  Execution run = with_threads(execution);
  const auto entry = choose<Tensors>(problem, resolved, run.device, run.deterministic);
  if (is_empty(problem, tensors)) {
    return;
  }
  check(problem, resolved, run.device, tensors);
  const std::size_t needed = entry.workspace_bytes(problem, resolved, run.threads);
  std::unique_ptr<std::byte[], AlignedDelete> own;
  if (run.workspace == nullptr && run.device == Device::cpu && needed > 0) {
    own.reset(static_cast<std::byte*>(::operator new[](needed, std::align_val_t{kWorkspaceAlignment})));
    run.workspace = own.get();
    run.workspace_bytes = needed;
  }
  const std::size_t given = run.workspace == nullptr ? 0 : run.workspace_bytes;
  if (given < needed) {
    throw Error(Status::out_of_memory,
                "the workspace has " + std::to_string(given) + " bytes; allowed: at least " + std::to_string(needed));
  }
  entry.run(problem, resolved, tensors, run);
}

template <class Tensors>
Explanation explain_operation(const Problem& problem, const Grouping& grouping, Device device, bool deterministic) {
  Resolved resolved = resolve(problem, grouping, device);
  Explanation result{resolved.grouping,
                     std::move(resolved.choice),
                     {},
                     judge<Tensors>(problem, resolved.grouping, device, deterministic)};
  for (const KernelVerdict& verdict : result.verdicts) {
    if (verdict.reason.empty()) {
      result.kernel = verdict.kernel.name;
      break;
    }
  }
  return result;
}

template <class Tensors>
std::size_t operation_workspace_bytes(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  const Grouping resolved = resolve(problem, grouping, execution.device).grouping;
  return choose<Tensors>(problem, resolved, execution.device, execution.deterministic)
      .workspace_bytes(problem, resolved, execution.threads);
}

}  // namespace

inline namespace v0 {

void make_grouping(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                   const Execution& execution) {
  call(problem, grouping, tensors, execution);
}

void forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
             const Execution& execution) {
  call(problem, grouping, tensors, execution);
}

void backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
              const Execution& execution) {
  call(problem, grouping, tensors, execution);
}

std::size_t workspace_bytes(Operation operation, const Problem& problem, const Grouping& grouping,
                            const Execution& execution) {
  validate(problem, grouping);
  const Execution run = with_threads(execution);
  switch (operation) {
    case Operation::grouping:
      return operation_workspace_bytes<GroupingTensors>(problem, grouping, run);
    case Operation::forward:
      return operation_workspace_bytes<ForwardTensors>(problem, grouping, run);
    case Operation::backward:
      break;
  }
  return operation_workspace_bytes<BackwardTensors>(problem, grouping, run);
}

std::vector<KernelInfo> list() {
  std::vector<KernelInfo> kernels;
  const auto add = [&](const auto& entry) { kernels.push_back(info_of(entry)); };
  for_each_kernel<GroupingTensors>(add);
  for_each_kernel<ForwardTensors>(add);
  for_each_kernel<BackwardTensors>(add);
  return kernels;
}

Explanation explain(Operation operation, const Problem& problem, const Grouping& grouping, Device device,
                    bool deterministic) {
  validate(problem, grouping);
  switch (operation) {
    case Operation::grouping:
      return explain_operation<GroupingTensors>(problem, grouping, device, deterministic);
    case Operation::forward:
      return explain_operation<ForwardTensors>(problem, grouping, device, deterministic);
    case Operation::backward:
      break;
  }
  return explain_operation<BackwardTensors>(problem, grouping, device, deterministic);
}

Grouping resolve_strategy(const Problem& problem, const Grouping& grouping, Device device) {
  validate(problem, grouping);
  return resolve(problem, grouping, device).grouping;
}

std::vector<std::string> device_names(Device device) {
  std::string reason;
  return device == Device::cpu ? std::vector<std::string>{"cpu"} : cuda_device_names(reason);
}

}  // namespace v0
}  // namespace distr
