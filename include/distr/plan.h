// SPDX-License-Identifier: Apache-2.0
// What a call will do, decided once: plan() validates the problem, resolves the strategy, chooses the kernel and lays
// out its workspace; run() decides nothing more. The functions of attention.h make a plan and run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "distr/attention.h"

namespace distr {
inline namespace v0 {

/// The part of the problem that a thread block (CUDA) or a task (CPU) takes.
struct TileShape {
  std::int64_t rows = 0;                  ///< of Q
  std::int64_t keys = 0;                  ///< that it takes at a time
  std::int64_t head_dim = 0, groups = 0;  ///< d and r of the compiled kernel, to which the problem's are padded

  bool operator==(const TileShape&) const = default;
};

/// One launch of a kernel; on the CPU one loop over tasks.
struct LaunchShape {
  TileShape tile;
  std::int64_t blocks = 0;        ///< thread blocks; CPU: tasks
  std::int64_t threads = 0;       ///< of a thread block; CPU: that share the tasks
  std::int64_t shared_bytes = 0;  ///< of a thread block; CPU: 0
};

/// A piece of the workspace.
struct WorkspacePart {
  const char* name;
  std::size_t offset, bytes;
};

/// An immutable value, cheap to copy. It may be run any number of times, and by several threads at the same time if
/// each brings a workspace of its own.
class Plan {
 public:
  [[nodiscard]] Operation operation() const noexcept;
  [[nodiscard]] const Problem& problem() const noexcept;
  [[nodiscard]] const Grouping& grouping() const noexcept;   ///< what it came to, without `automatic`
  [[nodiscard]] const std::string& choice() const noexcept;  ///< one sentence: what was chosen and why
  [[nodiscard]] const KernelInfo& kernel() const noexcept;
  [[nodiscard]] std::size_t workspace_bytes() const;
  [[nodiscard]] std::span<const WorkspacePart> workspace() const;
  [[nodiscard]] std::span<const LaunchShape> launches() const;
  /// The tiles that the kernel has for this problem, the one that it takes first. See Execution::tile_rows.
  [[nodiscard]] std::span<const TileShape> tiles() const;
  /// Whether forward and backward read an order.
  [[nodiscard]] bool reads_order() const noexcept;

  /// The plan of another operation on the same problem, which is neither validated nor resolved again.
  [[nodiscard]] Plan for_operation(Operation operation) const;

  /// The operation. Tensors must be those of the plan's operation; `execution` replaces the plan's stream, workspace,
  /// parallel and progress, and the rest of it is not read. Throws as make_grouping(), forward() and backward() do.
  void run(const GroupingTensors& tensors) const;
  void run(const ForwardTensors& tensors) const;
  void run(const BackwardTensors& tensors) const;
  void run(const GroupingTensors& tensors, const Execution& execution) const;
  void run(const ForwardTensors& tensors, const Execution& execution) const;
  void run(const BackwardTensors& tensors, const Execution& execution) const;

 private:
  struct State;
  explicit Plan(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  friend Plan plan(Operation operation, const Problem& problem, const Grouping& grouping, const Execution& execution);

  std::shared_ptr<const State> state_;
};

/// Throws Error(invalid_argument) for a problem or grouping that validate() refuses and for values of `execution` that
/// are not allowed, Error(unsupported) where no kernel of the device serves; the message has each kernel's reason.
[[nodiscard]] Plan plan(Operation operation, const Problem& problem, const Grouping& grouping,
                        const Execution& execution = {});

/// How often this process has validated a problem, resolved a strategy and chosen a kernel: once in each call. For
/// tests of what stands between a user and the library.
struct Decisions {
  std::int64_t validated = 0, resolved = 0, chosen = 0;
};
[[nodiscard]] Decisions decisions() noexcept;

}  // namespace v0
}  // namespace distr
