// SPDX-License-Identifier: Apache-2.0
// Chunks through devices: what StreamedAttention is, on devices of any kind.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "distributed/stream_device.h"

namespace distr::distributed {

// Where the tensors of a chunk are on a device, whose memory holds two of them and one of what only kernels use.
struct Places {
  std::size_t q = 0, k = 0, v = 0, order = 0, o = 0, lse = 0, halves = 0;  // offsets from a slot's
  std::size_t slot_bytes = 0;
  std::size_t own_order = 0, key_means = 0, workspace = 0;  // offsets of what both slots share
  std::size_t workspace_bytes = 0, bytes = 0;               // bytes: of all
};

// The plans of a chunk.
struct ChunkPlans {
  std::int64_t batches, heads;  // that they are for
  Plan forward;
  std::optional<Plan> grouping;  // where an order or means are to be computed
};

class Streaming {
 public:
  Streaming(const Problem& problem, const Grouping& grouping, std::int64_t chunk_heads,
            std::vector<std::unique_ptr<StreamDevice>> devices);

  void run(const ForwardTensors& tensors, StreamWork work,
           const std::function<void(std::int64_t, std::int64_t)>& progress);

  [[nodiscard]] const Plan& whole() const { return *whole_; }  // of one call
  [[nodiscard]] const std::vector<Chunk>& chunks() const { return chunks_; }
  [[nodiscard]] std::size_t device_bytes() const { return device_bytes_; }
  [[nodiscard]] const std::vector<StreamSpan>& timeline() const { return timeline_; }

 private:
  struct Worker {
    std::unique_ptr<StreamDevice> device;
    std::vector<ChunkPlans> plans;
    Places places;
    std::byte* memory = nullptr;
    std::vector<StreamSpan> timeline;
  };
  struct Run;  // one call of run()

  void prepare(Worker& worker) const;
  [[nodiscard]] ChunkPlans plan_chunk(const Chunk& chunk, const Execution& execution) const;
  [[nodiscard]] bool copies_order() const;

  Problem problem_;
  std::optional<Plan> whole_;
  std::vector<Chunk> chunks_;
  std::vector<Worker> workers_;
  std::size_t device_bytes_ = 0;
  std::vector<StreamSpan> timeline_;
};

}  // namespace distr::distributed
