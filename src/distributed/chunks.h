// SPDX-License-Identifier: Apache-2.0
// How a problem is cut into chunks of heads, and the copies that a chunk's tensors take.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "distr/plan.h"

namespace distr::distributed {

// Heads of Q of some batch entries: several entries only with all heads.
struct Chunk {
  std::int64_t batch = 0, batches = 0, head = 0, heads = 0;
};

// Chunks of about the same size, of at most chunk_heads heads each (StreamOptions::chunk_heads), for so many devices.
// Throws Error(invalid_argument) for a number that is not allowed.
[[nodiscard]] std::vector<Chunk> chunks_of(const Problem& problem, std::int64_t chunk_heads, std::size_t devices);

// The chunk as a problem, with contiguous tensors.
[[nodiscard]] Problem problem_of(const Problem& problem, const Chunk& chunk);

// Indices of chunks, each given to one thread.
class Queue {
 public:
  explicit Queue(std::int64_t count) : count_(count) {}
  [[nodiscard]] std::optional<std::int64_t> take() noexcept {
    const std::int64_t index = next_.fetch_add(1);
    return index < count_ ? std::optional(index) : std::nullopt;
  }
  // Gives out nothing from here on.
  void stop() noexcept { next_ = count_; }

 private:
  std::int64_t count_;
  std::atomic<std::int64_t> next_ = 0;
};

// A tensor [B, heads, rows, columns] in host memory; columns are contiguous.
struct HostTensor {
  std::byte* data = nullptr;
  std::size_t element_bytes = 0;
  std::int64_t rows = 0, columns = 0;
  std::int64_t heads_of_one = 1;  // heads of Q that share one of its
  Strides strides;                // in elements

  // Of a chunk, packed.
  [[nodiscard]] std::size_t bytes(const Chunk& chunk) const noexcept;
};

// `rows` rows of `width` bytes, so many bytes apart in host memory and behind each other in the packed chunk.
struct Copy {
  std::byte* host;
  std::size_t pitch;
  std::size_t packed;  // offset in the chunk's tensor
  std::size_t width, rows;
};

// As few copies as the strides allow.
[[nodiscard]] std::vector<Copy> copies_of(const HostTensor& tensor, const Chunk& chunk);

}  // namespace distr::distributed
