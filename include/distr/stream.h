// SPDX-License-Identifier: Apache-2.0
// Attention of tensors in host memory, which need not fit a device, or in the memory of one device, whose work others
// share: chunks of heads go through one or several devices, and each device copies the next chunk in and the last one
// out while it computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "distr/plan.h"

namespace distr {
inline namespace v0 {

/// What a run does of copies and attention; all but the first are for measurements, and leave O undefined.
enum class StreamWork : std::uint8_t {
  all,
  copies,   ///< of inputs and outputs, nothing is computed
  compute,  ///< on what the devices hold, nothing is copied (but a caller's order)
};

struct StreamOptions {
  Device device = Device::cuda;
  /// CUDA: numbers of devices, as CUDA_VISIBLE_DEVICES leaves them, at least one. A device may be named twice: it then
  /// takes two chunks at a time, in twice the memory. On the CPU {0}.
  std::vector<int> devices{0};
  /// The most heads of Q that a chunk has, counted over the batch: up to heads_q they are of one batch entry, and a
  /// multiple of heads_q / heads_kv; above, a chunk is as many whole batch entries as this has. 0: a twelfth of what a
  /// device gets, about.
  std::int64_t chunk_heads = 0;
  int threads = 0;  ///< CPU; 0: one for each processor this process may use
  /// Called with the count of finished chunks, by one thread at a time. Must not throw.
  std::function<void(std::int64_t done, std::int64_t total)> progress;
};

/// A step of a chunk on its way through a device.
struct StreamSpan {
  enum class Stage : std::uint8_t { copy_in, compute, copy_out };

  std::size_t device = 0;  ///< an index into StreamOptions::devices
  std::int64_t chunk = 0;
  Stage stage = Stage::copy_in;
  double begin = 0, end = 0;  ///< milliseconds since the run began, by the device's clock
};

/// forward() with its grouping, chunk by chunk. Each device has a thread, which draws chunks from one queue, and memory
/// for two chunks; copies in, kernels and copies out are on streams of their own, which wait for each other by events
/// and for nothing else. Heads do not depend on each other, so the result is that of one call, and has the same
/// bits for every size of chunk, number of devices and run while chunks are served by the kernel that serves one
/// call (kernel()) and it does not split the keys between thread blocks or tasks ("sm80/forward" does where there
/// are few tiles, the CPU's where a chunk has fewer than 32 tiles of 128 queries and 4096 keys or more).
class StreamedAttention {
 public:
  /// Plans, and allocates on the devices. Throws Error with
  ///   invalid_argument: what plan() refuses, options that are not allowed, a mask (a causal corner is none), a sliding
  ///   window, `part`;
  ///   unsupported: no kernel serves, or a device cannot be used;
  ///   out_of_memory: a device lacks device_bytes(), which fewer heads in a chunk lessen.
  /// What concerns one device begins with its name.
  StreamedAttention(const Problem& problem, const Grouping& grouping, const StreamOptions& options = {});
  StreamedAttention(StreamedAttention&& other) noexcept;
  StreamedAttention& operator=(StreamedAttention&& other) noexcept;
  ~StreamedAttention();

  /// Tensors in host memory, with the problem's strides; rows must not overlap. Pinned memory (CudaPin) is copied at
  /// full speed and while kernels run, other memory is not. CUDA: they may lie in a device's memory instead, which
  /// each other device should reach (cuda_reach()); what writes them must have finished. `order` is read in `given`,
  /// and null else: each chunk's is computed on the device, as the means of the keys are. lse and halves may be null.
  /// Returns when O is there. Throws Error(invalid_argument) before anything is written, and what a device fails with,
  /// beginning with its name, once all have stopped; outputs are then written in part. One run at a time.
  void run(const ForwardTensors& tensors, StreamWork work = StreamWork::all);

  [[nodiscard]] const Grouping& grouping() const noexcept;   ///< what it came to, without `automatic`
  [[nodiscard]] const std::string& choice() const noexcept;  ///< one sentence: what was chosen and why
  [[nodiscard]] const KernelInfo& kernel() const noexcept;   ///< of one call, and of the chunks where it serves them
  [[nodiscard]] std::int64_t chunks() const noexcept;
  [[nodiscard]] std::size_t device_bytes() const noexcept;  ///< memory on each device, less than two chunks need
  /// Of the last run, in no order.
  [[nodiscard]] const std::vector<StreamSpan>& timeline() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace v0
}  // namespace distr
