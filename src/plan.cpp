// SPDX-License-Identifier: Apache-2.0
// Where a call is decided: validated, its strategy resolved, its kernel chosen. Each happens once.
#include "distr/plan.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "check.h"
#include "common/parallel.h"
#include "decisions.h"
#include "dispatch.h"

namespace distr {
namespace {

constexpr std::size_t kWorkspaceAlignment = 64;

[[noreturn]] void invalid(const std::string& message) { throw Error(Status::invalid_argument, message); }

const char* name_of(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

Execution with_threads(Execution execution) {
  if (execution.threads < 0) {
    invalid("threads is " + std::to_string(execution.threads) + "; allowed: 0 (all processors) and above");
  }
  if (execution.threads == 0) {
    execution.threads = common::available_processors();
  }
  return execution;
}

// Nothing serves: the message has each kernel's reason.
template <class Tensors>
[[noreturn]] void refuse(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  std::string message = std::string("no kernel on ") + name_of(execution.device) + " serves this problem";
  for (const KernelVerdict& verdict : judge<Tensors>(problem, grouping, execution.device, execution.deterministic)) {
    message += "; " + verdict.kernel.name + ": " + verdict.reason;
  }
  std::string reason;
  if (execution.device == Device::cuda && cuda_device_names(reason).empty()) {
    message += "; " + reason;
  }
  throw Error(Status::unsupported, message);
}

// The kernel that the caller names, with the reason where it does not serve.
template <class Tensors>
KernelEntry<Tensors> named(const Problem& problem, const Grouping& grouping, const Execution& execution,
                           const DisabledKernels& disabled) {
  const KernelEntry<Tensors>* found = nullptr;
  std::string names;
  for_each_kernel<Tensors>([&](const KernelEntry<Tensors>& entry) {
    if (entry.device == execution.device) {
      found = entry.name == execution.kernel ? &entry : found;
      names += (names.empty() ? "" : ", ") + std::string(entry.name);
    }
  });
  if (found == nullptr) {
    invalid("kernel is '" + execution.kernel + "'; allowed: " + (names.empty() ? "none" : names));
  }
  const std::string reason = reason_against(*found, problem, grouping, execution.deterministic, disabled);
  if (!reason.empty()) {
    throw Error(Status::unsupported, execution.kernel + ": " + reason);
  }
  return *found;
}

// The first kernel that serves.
template <class Tensors>
KernelEntry<Tensors> choose(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  count(decision_counts.chosen);
  const DisabledKernels disabled;
  disabled.validate();
  if (!execution.kernel.empty()) {
    return named<Tensors>(problem, grouping, execution, disabled);
  }
  const KernelEntry<Tensors>* first = nullptr;
  for_each_kernel<Tensors>([&](const KernelEntry<Tensors>& entry) {
    if (first == nullptr && entry.device == execution.device &&
        reason_against(entry, problem, grouping, execution.deterministic, disabled).empty()) {
      first = &entry;
    }
  });
  if (first == nullptr) {
    refuse<Tensors>(problem, grouping, execution);
  }
  return *first;
}

void require_tile(const Execution& execution, std::span<const TileShape> tiles) {
  if (execution.tile_rows == 0 || (!tiles.empty() && tiles.front().rows == execution.tile_rows)) {
    return;
  }
  std::string allowed = "0";
  for (const TileShape& tile : tiles) {
    allowed += ", " + std::to_string(tile.rows);
  }
  invalid("tile_rows is " + std::to_string(execution.tile_rows) + "; allowed: " + allowed);
}

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{kWorkspaceAlignment}); }
};

// What the caller gave as workspace; on the CPU, where it gave none, memory that `own` holds.
void add_workspace(Execution& execution, std::size_t needed, std::unique_ptr<std::byte[], AlignedDelete>& own) {
  if (execution.workspace == nullptr && execution.device == Device::cpu && needed > 0) {
    own.reset(static_cast<std::byte*>(::operator new[](needed, std::align_val_t{kWorkspaceAlignment})));
    execution.workspace = own.get();
    execution.workspace_bytes = needed;
  }
  const std::size_t given = execution.workspace == nullptr ? 0 : execution.workspace_bytes;
  if (given < needed) {
    throw Error(Status::out_of_memory,
                "the workspace has " + std::to_string(given) + " bytes; allowed: at least " + std::to_string(needed));
  }
}

}  // namespace

inline namespace v0 {

struct Plan::State {
  Operation operation;
  Problem problem;
  Resolved resolved;
  Execution execution;
  KernelInfo kernel;
  std::variant<KernelPlan<GroupingTensors>, KernelPlan<ForwardTensors>, KernelPlan<BackwardTensors>> decided;

  // Decides the rest once problem, grouping and execution are there.
  void choose_kernel() {
    with_tensors(operation, [this]<class Tensors>(std::type_identity<Tensors>) {
      const auto entry = choose<Tensors>(problem, resolved.grouping, execution);
      kernel = info_of(entry);
      decided = entry.plan(problem, resolved.grouping, execution);
      require_tile(execution, std::get<KernelPlan<Tensors>>(decided).tiles);
    });
  }

  template <class Tensors>
  void run(const Tensors& tensors, Execution with) const {
    if (OperationOf<Tensors>::kOperation != operation) {
      invalid(
          "the tensors are not those of the plan's operation; allowed: GroupingTensors, ForwardTensors or "
          "BackwardTensors, as the plan was made for");
    }
    if (is_empty(problem, tensors)) {
      return;
    }
    check(problem, resolved.grouping, execution.device, tensors);
    const auto& of_kernel = std::get<KernelPlan<Tensors>>(decided);
    with.device = execution.device;
    with.threads = execution.threads;
    std::unique_ptr<std::byte[], AlignedDelete> own;
    add_workspace(with, of_kernel.workspace.bytes(), own);
    of_kernel.run(tensors, with);
  }

  template <class Get>
  [[nodiscard]] decltype(auto) of_kernel(const Get& get) const {
    return std::visit(get, decided);
  }
};

Plan plan(Operation operation, const Problem& problem, const Grouping& grouping, const Execution& execution) {
  validate(problem, grouping);
  if (operation == Operation::backward && grouping.skip > 0) {
    invalid("skip is " + std::to_string(grouping.skip) +
            " in a call with gradients; allowed: 0, as skipping is for the "
            "forward alone");
  }
  if (operation == Operation::backward && problem.key_lengths) {
    invalid("key_lengths was given in a call with gradients; allowed: packed sequences, or a mask");
  }
  auto state = std::make_shared<Plan::State>(
      Plan::State{operation, problem, resolve(problem, grouping, execution.device), with_threads(execution), {}, {}});
  state->choose_kernel();
  return Plan(std::move(state));
}

Plan Plan::for_operation(Operation operation) const {
  auto state = std::make_shared<State>(State{operation, state_->problem, state_->resolved, state_->execution, {}, {}});
  state->execution.kernel.clear();  // these are the other operation's
  state->execution.tile_rows = 0;
  state->choose_kernel();
  return Plan(std::move(state));
}

Operation Plan::operation() const noexcept { return state_->operation; }
const Problem& Plan::problem() const noexcept { return state_->problem; }
const Grouping& Plan::grouping() const noexcept { return state_->resolved.grouping; }
const std::string& Plan::choice() const noexcept { return state_->resolved.choice; }
const KernelInfo& Plan::kernel() const noexcept { return state_->kernel; }
bool Plan::reads_order() const noexcept { return !is_exact(state_->resolved.grouping); }

std::size_t Plan::workspace_bytes() const {
  return state_->of_kernel([](const auto& decided) { return decided.workspace.bytes(); });
}
std::span<const WorkspacePart> Plan::workspace() const {
  return state_->of_kernel([](const auto& decided) { return decided.workspace.parts(); });
}
std::span<const LaunchShape> Plan::launches() const {
  return state_->of_kernel([](const auto& decided) { return std::span<const LaunchShape>(decided.launches); });
}
std::span<const TileShape> Plan::tiles() const {
  return state_->of_kernel([](const auto& decided) { return std::span<const TileShape>(decided.tiles); });
}

void Plan::run(const GroupingTensors& tensors) const { state_->run(tensors, state_->execution); }
void Plan::run(const ForwardTensors& tensors) const { state_->run(tensors, state_->execution); }
void Plan::run(const BackwardTensors& tensors) const { state_->run(tensors, state_->execution); }
void Plan::run(const GroupingTensors& tensors, const Execution& execution) const { state_->run(tensors, execution); }
void Plan::run(const ForwardTensors& tensors, const Execution& execution) const { state_->run(tensors, execution); }
void Plan::run(const BackwardTensors& tensors, const Execution& execution) const { state_->run(tensors, execution); }

Decisions decisions() noexcept {
  const auto read = [](const auto& count) { return count.load(std::memory_order_relaxed); };
  return {read(decision_counts.validated), read(decision_counts.resolved), read(decision_counts.chosen)};
}

}  // namespace v0
}  // namespace distr
