// SPDX-License-Identifier: Apache-2.0
// Attention of tensors that stay in host memory, chunk by chunk: options, pinned memory, and a run.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "distr/device.h"
#include "distr/stream.h"
#include "inputs.h"
#include "report.h"

namespace distr::cli {

inline constexpr int kMostDevices = 1 << 16;

struct StreamFlags {
  std::vector<int> devices;                 // empty: not given
  std::optional<std::int64_t> chunk_heads;  // empty: not given

  [[nodiscard]] bool any() const { return !devices.empty() || chunk_heads.has_value(); }
};

void add_stream_flags(CLI::App& app, StreamFlags& flags);

// The device that chunks go through: CUDA where devices are named. Throws InputError where it cannot be used.
[[nodiscard]] Device require_stream_device(const StreamFlags& flags, const RunOptions& run);

[[nodiscard]] StreamOptions stream_options(const StreamFlags& flags, const RunOptions& run, Device device);

// Memory of whole pages, and pinned where a GPU copies it.
class HostMemory {
 public:
  HostMemory(std::size_t bytes, Device device);
  [[nodiscard]] std::byte* data() { return memory_.get(); }

 private:
  struct Delete {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte[], Delete> memory_;
  std::optional<CudaPin> pin_;  // goes first
};

// Pins a tensor for a GPU's copies. A small one may share its pages with others, and is left as it is.
[[nodiscard]] std::optional<CudaPin> pinned(const std::vector<std::byte>& tensor, Device device);

// What a result tells of the chunks: count, devices and the memory on each.
[[nodiscard]] Json stream_json(const StreamedAttention& attention, const StreamOptions& options);

}  // namespace distr::cli
