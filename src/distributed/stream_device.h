// SPDX-License-Identifier: Apache-2.0
// What streaming needs of a device: three lanes of work, each in its own order, and marks between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "distr/stream.h"
#include "distributed/chunks.h"

namespace distr::distributed {

enum class Lane : std::uint8_t { in, compute, out };

// A point in a lane.
using Mark = std::shared_ptr<void>;

// All but name() and the destructor are called within within().
class StreamDevice {
 public:
  StreamDevice() = default;
  StreamDevice(const StreamDevice&) = delete;
  StreamDevice& operator=(const StreamDevice&) = delete;
  virtual ~StreamDevice() = default;

  // For messages: "CUDA device 1 (NVIDIA H200)".
  [[nodiscard]] virtual std::string name() const = 0;
  // Runs the body with the device as the calling thread's.
  virtual void within(const std::function<void()>& body) = 0;
  // What calls are planned and run with: on CUDA the stream of the compute lane.
  [[nodiscard]] virtual Execution execution() const = 0;
  // Memory that lasts as long as the device, aligned to 256 bytes.
  [[nodiscard]] virtual std::byte* allocate(std::size_t bytes) = 0;

  // Put work on a lane and need not wait for it. `packed` is where the copy's part of the chunk's tensor is on the
  // device; `call` may run later, too.
  virtual void copy_in(std::byte* packed, const Copy& copy) = 0;
  virtual void copy_out(const std::byte* packed, const Copy& copy) = 0;
  virtual void compute(std::function<void()> call) = 0;

  [[nodiscard]] virtual Mark mark(Lane lane) = 0;
  // What the lane gets from here on begins when the mark is reached.
  virtual void wait(Lane lane, const Mark& mark) = 0;
  // The calling thread waits.
  virtual void wait(const Mark& mark) = 0;
  [[nodiscard]] virtual double milliseconds(const Mark& begin, const Mark& end) = 0;  // both reached
  // Waits for all lanes, of which one may have failed.
  virtual void finish() = 0;
};

// The CPU, whose lanes are done when they are given work.
[[nodiscard]] std::unique_ptr<StreamDevice> make_cpu_device(int threads);
// Throws Error where the device cannot be used.
[[nodiscard]] std::unique_ptr<StreamDevice> make_cuda_device(int number);

}  // namespace distr::distributed
