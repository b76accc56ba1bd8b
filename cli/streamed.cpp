// SPDX-License-Identifier: Apache-2.0
#include "streamed.h"

#include <new>
#include <string>

#include "options.h"
#include "settings.h"
#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kOwnPages = std::size_t{64} << 20;  // bytes; malloc gives so many pages of their own

}  // namespace

void add_stream_flags(CLI::App& app, StreamFlags& flags) {
  add_list(app, "--devices", "INT", "Chunks of heads go through these GPUs from host memory; one may be named twice",
           flags.devices,
           [](const std::string& word) { return static_cast<int>(parse_integer("--devices", word, 0, kMostDevices)); })
      ->group(kRunGroup);
  add_integer(app, "--chunk-heads",
              "The same, with at most so many heads of Q in a chunk, over the batch [1/12 of all]", 1, kAny,
              [&flags](std::int64_t value) { flags.chunk_heads = value; })
      ->group(kRunGroup);
}

Device require_stream_device(const StreamFlags& flags, const RunOptions& run) {
  if (flags.devices.empty()) return require_device(run.device);
  if (run.device == Device::cpu) {
    throw InputError("--devices: GPUs are named, and --device is cpu; allowed: --device cuda, or no --device");
  }
  return require_device(Device::cuda);
}

StreamOptions stream_options(const StreamFlags& flags, const RunOptions& run, Device device) {
  StreamOptions options;
  options.device = device;
  if (!flags.devices.empty()) options.devices = flags.devices;
  options.chunk_heads = flags.chunk_heads.value_or(0);
  options.threads = run.threads;
  return options;
}

HostMemory::HostMemory(std::size_t bytes, Device device) {
  const std::size_t whole = (bytes / kPage + 1) * kPage;
  memory_.reset(static_cast<std::byte*>(::operator new[](whole, std::align_val_t{kPage})));
  if (device == Device::cuda) pin_.emplace(memory_.get(), whole);
}

void HostMemory::Delete::operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{kPage}); }

std::optional<CudaPin> pinned(const std::vector<std::byte>& tensor, Device device) {
  if (device == Device::cpu || tensor.size() < kOwnPages) return std::nullopt;
  return std::optional<CudaPin>(std::in_place, tensor.data(), tensor.size());
}

Json stream_json(const StreamedAttention& attention, const StreamOptions& options) {
  return {{"chunks", attention.chunks()},
          {"devices", options.device == Device::cuda ? Json(options.devices) : Json("cpu")},
          {"device_bytes", attention.device_bytes()}};
}

}  // namespace distr::cli
