// SPDX-License-Identifier: Apache-2.0
// Memory and time on a CUDA device, for programs that have no headers of CUDA. All is about the current device
// (CUDA_VISIBLE_DEVICES picks it for a process that does not). Streams are cudaStream_t; null is the default one. A
// build without CUDA has the functions too: they say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "distr/error.h"

namespace distr {
inline namespace v0 {

/// Why no CUDA kernel of this build can run here (built without CUDA, no driver, a driver that is too old, no device,
/// a device older than compute capability 8.0); empty: they can.
[[nodiscard]] std::string cuda_unusable_reason();

/// All below throw Error(unsupported) with that reason, where there is one, and Error(device_failure) with CUDA's words
/// where a call fails, which may be the failure of a kernel before it.

struct CudaDevice {
  std::string name;
  int major = 0, minor = 0;                 ///< compute capability
  std::int64_t processors = 0;              ///< SMs
  std::int64_t shared_memory = 0;           ///< bytes, of one SM
  std::int64_t cache = 0;                   ///< bytes, of the L2
  std::size_t free_memory = 0, memory = 0;  ///< bytes; of all processes together
  std::string runtime;                      ///< version of CUDA, "13.0"
};

[[nodiscard]] CudaDevice cuda_device();

/// Device memory, aligned to 256 bytes and freed at the end.
class CudaMemory {
 public:
  CudaMemory() = default;
  /// At least one byte. Throws Error(out_of_memory), which names the bytes that were asked for and those that are free.
  explicit CudaMemory(std::size_t bytes);

  [[nodiscard]] void* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return data_ == nullptr ? 0 : bytes_; }

  /// The first `bytes` bytes, from and to host memory, after the work that `stream` has. They return when the copy is
  /// done. Throw Error(invalid_argument) for more bytes than there are.
  void copy_from(const void* host, std::size_t bytes, void* stream = nullptr);
  void copy_to(void* host, std::size_t bytes, void* stream = nullptr) const;
  /// Sets all bytes to `value` after the work that `stream` has, without waiting for it.
  void fill(std::uint8_t value, void* stream = nullptr);

 private:
  struct Free {
    void operator()(void* data) const noexcept;
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
};

/// How many CUDA devices CUDA_VISIBLE_DEVICES leaves, usable or not; 0 where there are none or no driver.
[[nodiscard]] int cuda_device_count() noexcept;

/// Lets copies go directly between the current device and another where a link allows it. Elsewhere, and before this is
/// called, they go through host memory. Throws Error(invalid_argument) for a number that no device has.
void cuda_reach(int other);

/// Makes a device the calling thread's current one, and the one before again at the end.
class CudaDeviceScope {
 public:
  /// Throws Error(invalid_argument) for a number that no device has.
  explicit CudaDeviceScope(int device);
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;
  ~CudaDeviceScope();

 private:
  [[maybe_unused]] int before_ = 0;
};

/// Host memory that stays where it is while this lives (page-locked): devices copy it at full speed, and while they
/// compute. Costs about as much time as one slow copy.
class CudaPin {
 public:
  CudaPin() = default;
  /// Memory of whole pages, or alone in its pages: others must not be pinned by themselves. None, in words of
  /// reason(), where the system does not allow it: copies then are slow, but right.
  CudaPin(const void* host, std::size_t bytes);

  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }  ///< empty: it is pinned

 private:
  struct Release {
    void operator()(void* host) const noexcept;
  };
  std::unique_ptr<void, Release> pinned_;
  std::string reason_ = "nothing was to be pinned";
};

class CudaStream;

/// A point in a stream.
class CudaEvent {
 public:
  CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  ~CudaEvent();

  void record(const CudaStream& stream);
  /// The calling thread waits, without keeping a processor busy.
  void wait() const;
  /// Of two events of one device that have been reached.
  [[nodiscard]] double milliseconds_since(const CudaEvent& begin) const;
  [[nodiscard]] void* get() const noexcept { return event_; }  ///< a cudaEvent_t

 private:
  void* event_ = nullptr;
};

/// A stream that does not wait for the default one.
class CudaStream {
 public:
  /// Rows that are so many bytes apart.
  struct Rows {
    void* data;
    std::size_t pitch;
  };
  struct ConstRows {
    const void* data;
    std::size_t pitch;
  };

  CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  ~CudaStream();

  /// `rows` rows of `width` bytes, each in host memory or on a device. Returns at once where host memory is pinned.
  void copy(const Rows& to, const ConstRows& from, std::size_t width, std::size_t rows = 1);
  /// What the stream gets from here on waits.
  void wait(const CudaEvent& event);
  /// The calling thread waits for all that the stream has.
  void wait() const;
  [[nodiscard]] void* get() const noexcept { return stream_; }  ///< a cudaStream_t

 private:
  void* stream_ = nullptr;
};

/// Times of the work on a stream, by CUDA events.
class CudaStopwatch {
 public:
  explicit CudaStopwatch(void* stream = nullptr) : stream_(stream) {}
  CudaStopwatch(const CudaStopwatch&) = delete;
  CudaStopwatch& operator=(const CudaStopwatch&) = delete;
  ~CudaStopwatch();

  /// A mark behind the work that the stream has.
  void mark();
  /// Milliseconds from each mark to the next, when all have been reached; forgets the marks.
  [[nodiscard]] std::vector<double> laps();

 private:
  [[maybe_unused]] void* stream_;
  std::vector<void*> events_;               // cudaEvent_t; kept for the next time
  [[maybe_unused]] std::size_t marks_ = 0;  // how many of them are set
};

}  // namespace v0
}  // namespace distr
