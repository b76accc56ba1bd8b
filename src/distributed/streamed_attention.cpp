// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>

#include "distr/stream.h"
#include "distributed/streaming.h"

namespace distr {
namespace {

std::vector<std::unique_ptr<distributed::StreamDevice>> devices_of(const StreamOptions& options) {
  const bool is_cpu = options.device == Device::cpu;
  if (options.devices.empty() || (is_cpu && options.devices != std::vector{0})) {
    std::string numbers;
    for (const int number : options.devices) {
      numbers += (numbers.empty() ? "" : ", ") + std::to_string(number);
    }
    throw Error(Status::invalid_argument, "devices are {" + numbers + "}; allowed: " +
                                              (is_cpu ? "{0} on the CPU" : "at least one number of a CUDA device"));
  }
  std::vector<std::unique_ptr<distributed::StreamDevice>> devices;
  for (const int number : options.devices) {
    devices.push_back(is_cpu ? distributed::make_cpu_device(options.threads) : distributed::make_cuda_device(number));
  }
  return devices;
}

}  // namespace

inline namespace v0 {

struct StreamedAttention::State {
  distributed::Streaming streaming;
  std::function<void(std::int64_t, std::int64_t)> progress;
};

StreamedAttention::StreamedAttention(const Problem& problem, const Grouping& grouping, const StreamOptions& options)
    : state_(new State{{problem, grouping, options.chunk_heads, devices_of(options)}, options.progress}) {}
StreamedAttention::StreamedAttention(StreamedAttention&& other) noexcept = default;
StreamedAttention& StreamedAttention::operator=(StreamedAttention&& other) noexcept = default;
StreamedAttention::~StreamedAttention() = default;

void StreamedAttention::run(const ForwardTensors& tensors, StreamWork work) {
  state_->streaming.run(tensors, work, state_->progress);
}

const Grouping& StreamedAttention::grouping() const noexcept { return state_->streaming.whole().grouping(); }
const std::string& StreamedAttention::choice() const noexcept { return state_->streaming.whole().choice(); }
const KernelInfo& StreamedAttention::kernel() const noexcept { return state_->streaming.whole().kernel(); }
std::int64_t StreamedAttention::chunks() const noexcept {
  return static_cast<std::int64_t>(state_->streaming.chunks().size());
}
std::size_t StreamedAttention::device_bytes() const noexcept { return state_->streaming.device_bytes(); }
const std::vector<StreamSpan>& StreamedAttention::timeline() const noexcept { return state_->streaming.timeline(); }

}  // namespace v0
}  // namespace distr
