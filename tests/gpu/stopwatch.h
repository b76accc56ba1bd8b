// SPDX-License-Identifier: Apache-2.0
// Device memory, and times on the device by events.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace distr::test {

// Device memory, freed at the end.
class Memory {
 public:
  explicit Memory(std::size_t bytes);
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Memory();
  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

struct Times {
  std::vector<float> ms;  // ascending
  [[nodiscard]] double median() const { return ms[ms.size() / 2]; }
};

// Calls call(0), call(1), ... after a warm-up and times each, for about `seconds` and at least 5 times. `call` puts
// work on `stream` and turns to another set of inputs at each number, so that the L2 cache is not the memory.
[[nodiscard]] Times measure(void* stream, double seconds, const std::function<void(int)>& call);

// The same out of a CUDA graph, so that the host has no part in it, for calls shorter than their launches. Before each
// call stands a memset of one word, so that none begins before the last one's end; what memsets alone take is taken
// off.
[[nodiscard]] Times measure_in_graph(void* stream, double seconds, const std::function<void(int)>& call);

}  // namespace distr::test
