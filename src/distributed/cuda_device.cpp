// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <optional>

#include "distr/device.h"
#include "distributed/stream_device.h"

namespace distr::distributed {
namespace {

class CudaStreamDevice : public StreamDevice {
 public:
  explicit CudaStreamDevice(int number) : number_(number), name_("CUDA device " + std::to_string(number)) {
    execution_.device = Device::cuda;
    execution_.check_memory = false;  // it is allocated here
    const CudaDeviceScope scope(number);
    const std::string reason = cuda_unusable_reason();
    if (!reason.empty()) {
      throw Error(Status::unsupported, name_ + " cannot be used: " + reason);
    }
    name_ += " (" + cuda_device().name + ")";
    for (auto& stream : streams_) {
      stream.emplace();
    }
    execution_.stream = stream(Lane::compute).get();
  }

  [[nodiscard]] std::string name() const override { return name_; }
  void within(const std::function<void()>& body) override {
    const CudaDeviceScope scope(number_);
    body();
  }
  [[nodiscard]] Execution execution() const override { return execution_; }
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override {
    memory_ = CudaMemory(bytes);
    return static_cast<std::byte*>(memory_.data());
  }
  void copy_in(std::byte* packed, const Copy& copy) override {
    stream(Lane::in).copy({packed, copy.width}, {copy.host, copy.pitch}, copy.width, copy.rows);
  }
  void copy_out(const std::byte* packed, const Copy& copy) override {
    stream(Lane::out).copy({copy.host, copy.pitch}, {packed, copy.width}, copy.width, copy.rows);
  }
  void compute(std::function<void()> call) override { call(); }
  [[nodiscard]] Mark mark(Lane lane) override {
    auto event = std::make_shared<CudaEvent>();
    event->record(stream(lane));
    return event;
  }
  void wait(Lane lane, const Mark& mark) override { stream(lane).wait(event(mark)); }
  void wait(const Mark& mark) override { event(mark).wait(); }
  [[nodiscard]] double milliseconds(const Mark& begin, const Mark& end) override {
    return event(end).milliseconds_since(event(begin));
  }
  void finish() override {
    for (auto& each : streams_) {
      each->wait();
    }
  }

 private:
  static const CudaEvent& event(const Mark& mark) { return *static_cast<const CudaEvent*>(mark.get()); }
  CudaStream& stream(Lane lane) { return *streams_[static_cast<std::size_t>(lane)]; }

  int number_;
  std::string name_;
  Execution execution_;
  std::array<std::optional<CudaStream>, 3> streams_;
  CudaMemory memory_;
};

}  // namespace

std::unique_ptr<StreamDevice> make_cuda_device(int number) { return std::make_unique<CudaStreamDevice>(number); }

}  // namespace distr::distributed
