// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstring>
#include <new>

#include "distributed/stream_device.h"

namespace distr::distributed {
namespace {

using Instant = std::chrono::steady_clock::time_point;

class CpuDevice : public StreamDevice {
 public:
  explicit CpuDevice(int threads) { execution_.threads = threads; }

  [[nodiscard]] std::string name() const override { return "the CPU"; }
  void within(const std::function<void()>& body) override { body(); }
  [[nodiscard]] Execution execution() const override { return execution_; }
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override {
    memory_.reset(static_cast<std::byte*>(::operator new[](bytes, kAlignment)));
    return memory_.get();
  }
  void copy_in(std::byte* packed, const Copy& copy) override {
    for (std::size_t row = 0; row < copy.rows; ++row) {
      std::memcpy(packed + row * copy.width, copy.host + row * copy.pitch, copy.width);
    }
  }
  void copy_out(const std::byte* packed, const Copy& copy) override {
    for (std::size_t row = 0; row < copy.rows; ++row) {
      std::memcpy(copy.host + row * copy.pitch, packed + row * copy.width, copy.width);
    }
  }
  void compute(std::function<void()> call) override { call(); }
  [[nodiscard]] Mark mark(Lane /*lane*/) override {
    return std::make_shared<Instant>(std::chrono::steady_clock::now());
  }
  void wait(Lane /*lane*/, const Mark& /*mark*/) override {}
  void wait(const Mark& /*mark*/) override {}
  [[nodiscard]] double milliseconds(const Mark& begin, const Mark& end) override {
    const auto time = [](const Mark& mark) { return *static_cast<const Instant*>(mark.get()); };
    return std::chrono::duration<double, std::milli>(time(end) - time(begin)).count();
  }
  void finish() override {}

 private:
  static constexpr std::align_val_t kAlignment{256};
  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete[](memory, kAlignment); }
  };

  Execution execution_;
  std::unique_ptr<std::byte[], Delete> memory_;
};

}  // namespace

std::unique_ptr<StreamDevice> make_cpu_device(int threads) { return std::make_unique<CpuDevice>(threads); }

}  // namespace distr::distributed
