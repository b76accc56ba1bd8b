// SPDX-License-Identifier: Apache-2.0
// The tensors of one problem on the device that computes, the operations on them, and their times.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "distr/device.h"
#include "distr/plan.h"
#include "inputs.h"

namespace distr::cli {

// A buffer in the memory of one device.
class Buffer {
 public:
  explicit Buffer(Device device) : device_(device) {}

  // Loses the content. Memory that is large enough is reused.
  void resize(std::size_t bytes);
  void write(std::span<const std::byte> content);
  [[nodiscard]] std::vector<std::byte> read() const;
  [[nodiscard]] std::vector<std::byte> take();  // leaves the buffer empty

  // Null if the buffer is empty.
  [[nodiscard]] void* data();
  [[nodiscard]] std::size_t size() const { return bytes_; }
  [[nodiscard]] bool empty() const { return bytes_ == 0; }

 private:
  Device device_;
  std::size_t bytes_ = 0;
  std::vector<std::byte> host_;  // CPU
  CudaMemory cuda_;              // CUDA; holds `bytes_` bytes or more
};

class Computation {
 public:
  enum class Outputs : std::uint8_t { o, o_and_lse, gradients };  // each includes those before it

  // Keeps a reference to `inputs`, and copies them to a GPU. Throws Error if the device cannot be used or lacks memory.
  Computation(const Inputs& inputs, Outputs outputs, Device device, int threads);

  // The plan of a setting, which is decided once for all of its operations. Throws Error if no kernel serves it.
  [[nodiscard]] Plan decide(Operation operation, const Grouping& grouping) const;

  // The operations of a setting, by a plan of any of them. The order, and the means of the keys where the setting has
  // some, are kept for those that read them. In `given` there are only means to make.
  void use_order(std::span<const std::int32_t> order);
  void make_order(const Plan& plan);
  void forward(const Plan& plan);
  void forward_counting(const Plan& plan);  // of a setting that skips; it fills halves()
  void backward(const Plan& plan);          // any upstream gradient will do: dO = O

  // Copies of the results.
  [[nodiscard]] std::vector<std::int32_t> order() const;
  [[nodiscard]] std::vector<float> key_means() const;
  [[nodiscard]] std::vector<std::int32_t> halves() const;
  [[nodiscard]] std::vector<std::byte> o() const { return o_.read(); }
  [[nodiscard]] std::vector<std::byte> take_o() { return o_.take(); }
  [[nodiscard]] std::vector<std::byte> take_lse() { return lse_.take(); }

  // mark() records a time between two operations, and laps() returns the milliseconds from each mark to the next. A GPU
  // measures its own time.
  void mark();
  [[nodiscard]] std::vector<double> laps();

  // Called before a timed run: evicts the tensors from a GPU's caches, as other work would.
  void flush_caches();

  // The GPU memory, beyond inputs and outputs, that the last operations needed for order and workspace. 0 on the CPU.
  [[nodiscard]] std::int64_t extra_bytes() const;
  // Frees order and workspace.
  void release();

  [[nodiscard]] Execution& execution() { return execution_; }

 private:
  using Clock = std::chrono::steady_clock;

  const void* place(const std::vector<std::byte>& tensor);
  [[nodiscard]] const std::int32_t* order_data() { return static_cast<const std::int32_t*>(order_.data()); }
  [[nodiscard]] const float* means_data() { return static_cast<const float*>(key_means_.data()); }
  // The operation's plan, for which the workspace is large enough then.
  [[nodiscard]] Plan prepared(const Plan& plan, Operation operation);
  [[nodiscard]] ForwardTensors forward_tensors();

  const Inputs& inputs_;
  Execution execution_;
  std::vector<Buffer> placed_;  // the inputs, on a GPU
  ForwardTensors tensors_;      // the inputs
  Buffer order_, key_means_, halves_, o_, lse_, d_q_, d_k_, d_v_, workspace_;
  std::vector<Clock::time_point> marks_;     // CPU
  std::optional<CudaStopwatch> stopwatch_;   // CUDA
  std::optional<CudaMemory> other_content_;  // larger than the caches
};

// Of the far halves of tiles in which a row sees a far key, the share that was kept; empty: there are none.
[[nodiscard]] std::optional<double> kept_share(std::span<const std::int32_t> halves);

}  // namespace distr::cli
