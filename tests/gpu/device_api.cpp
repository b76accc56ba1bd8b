// SPDX-License-Identifier: Apache-2.0
#include "gpu/device_api.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "distr/attention.h"
#include "distr/device.h"
#include "support/cases.h"

namespace distr::test {
namespace {

constexpr std::uint8_t kPoison = 0xFF;

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(Status::device_failure, std::string(what) + ": " + cudaGetErrorString(status));
  }
}

class Stream {
 public:
  Stream() { require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Work that a stream cannot get past before it is opened.
class Gate {
 public:
  explicit Gate(const Stream& stream) {
    const auto wait = [](void* open) {
      while (!static_cast<std::atomic<bool>*>(open)->load()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    require(cudaLaunchHostFunc(stream.get(), wait, &open_), "cudaLaunchHostFunc");
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { open(); }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_ = false;
};

// Grouping, forward and backward of one problem in device memory.
class Calls {
 public:
  Calls(Instance& instance, const Stream& stream)
      : problem_(instance.test_case.problem), grouping_(instance.test_case.grouping), stream_(stream) {
    execution_.device = Device::cuda;
    execution_.stream = stream.get();
    const std::size_t element = size_of(problem_.dtype);
    const auto bytes = [element](const Buffer& buffer) { return static_cast<std::size_t>(buffer.count()) * element; };
    const std::array<const Buffer*, 3> inputs{&instance.q, &instance.k, &instance.v};
    for (std::size_t n = 0; n < inputs.size(); ++n) {
      given_[n] = CudaMemory(bytes(*inputs[n]));
      given_[n].copy_from(inputs[n]->data(), bytes(*inputs[n]));
      inputs_[n] = CudaMemory(bytes(*inputs[n]));
    }
    const std::size_t rows = static_cast<std::size_t>(instance.lse.count()) * sizeof(float);
    outputs_ = {CudaMemory(instance.order.size() * sizeof(std::int32_t)),
                CudaMemory(bytes(instance.o)),
                CudaMemory(rows),
                CudaMemory(bytes(instance.q)),
                CudaMemory(bytes(instance.k)),
                CudaMemory(bytes(instance.v))};
    std::size_t workspace = 0;
    for (const Operation operation : {Operation::grouping, Operation::forward, Operation::backward}) {
      workspace = std::max(workspace, workspace_bytes(operation, problem_, grouping_, execution_));
    }
    workspace_ = CudaMemory(workspace);
    execution_.workspace = workspace_.data();
    execution_.workspace_bytes = workspace_.bytes();
  }

  // Inputs and outputs, on this stream.
  void poison() {
    for (CudaMemory& memory : inputs_) {
      memory.fill(kPoison, stream_.get());
    }
    for (CudaMemory& memory : outputs_) {
      memory.fill(kPoison, stream_.get());
    }
  }

  // Puts everything on the stream: the inputs become what they should be, and the outputs follow.
  void run() {
    for (std::size_t n = 0; n < inputs_.size(); ++n) {
      require(cudaMemcpyAsync(inputs_[n].data(), given_[n].data(), given_[n].bytes(), cudaMemcpyDeviceToDevice,
                              stream_.get()),
              "cudaMemcpyAsync");
    }
    const auto& [order, o, lse, d_q, d_k, d_v] = outputs_;
    auto* const columns = static_cast<std::int32_t*>(order.data());
    const void* const q = inputs_[0].data();
    const void* const k = inputs_[1].data();
    const void* const v = inputs_[2].data();
    make_grouping(problem_, grouping_, {q, k, columns}, execution_);
    forward(problem_, grouping_, {q, k, v, nullptr, columns, o.data(), lse.data()}, execution_);
    BackwardTensors tensors{q, k, v, nullptr, columns};
    tensors.o = tensors.d_o = o.data();
    tensors.lse = lse.data();
    tensors.d_q = d_q.data();
    tensors.d_k = d_k.data();
    tensors.d_v = d_v.data();
    backward(problem_, grouping_, tensors, execution_);
  }

  // Read on a stream of the reader's.
  [[nodiscard]] std::vector<std::vector<std::uint8_t>> outputs(const Stream& reader) const {
    std::vector<std::vector<std::uint8_t>> all;
    for (const CudaMemory& memory : outputs_) {
      all.emplace_back(memory.bytes());
      memory.copy_to(all.back().data(), memory.bytes(), reader.get());
    }
    return all;
  }

 private:
  Problem problem_;
  Grouping grouping_;
  const Stream& stream_;
  Execution execution_;
  std::array<CudaMemory, 3> given_, inputs_;  // Q, K, V
  std::array<CudaMemory, 6> outputs_;         // order, O, LSE, dQ, dK, dV
  CudaMemory workspace_;
};

std::string expect_error(Status status, const std::vector<std::string>& words, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string text = error.what();
    for (const std::string& word : words) {
      if (text.find(word) == std::string::npos) {
        return "'" + text + "' lacks '" + word + "'";
      }
    }
    return error.status() == status ? "" : "another status with '" + text + "'";
  }
  return "no error, where '" + words.front() + "' was expected";
}

}  // namespace

std::string check_streams(DType dtype) {
  Instance instance(with_dtype(find("lsh, mean"), dtype));
  const Stream stream;
  const Stream reader;
  Calls calls(instance, stream);
  calls.poison();
  calls.run();
  const auto expected = calls.outputs(stream);
  calls.poison();
  const auto poison = calls.outputs(stream);
  if (poison == expected) {
    return "poison that looks like a result";
  }
  Gate gate(stream);
  calls.run();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const bool nothing_yet = calls.outputs(reader) == poison && cudaStreamQuery(stream.get()) == cudaErrorNotReady;
  gate.open();
  if (calls.outputs(stream) != expected) {
    return "the results behind other work of the stream differ";
  }
  return nothing_yet ? "" : "something was written before the stream's earlier work was done";
}

std::string check_memory() {
  CudaMemory memory(1000);
  std::vector<std::uint8_t> bytes(1000, 7);
  memory.copy_from(bytes.data(), 600);
  memory.fill(5);
  memory.copy_from(bytes.data(), 400);
  std::vector<std::uint8_t> back(1000);
  memory.copy_to(back.data(), 1000);
  if (back[0] != 7 || back[399] != 7 || back[400] != 5 || back[999] != 5) {
    return "copies and fills differ";
  }
  CudaStopwatch stopwatch;
  for (int n = 0; n < 3; ++n) {
    stopwatch.mark();
    memory.fill(5);
  }
  const std::vector<double> laps = stopwatch.laps();
  if (laps.size() != 2 || !(laps[0] >= 0) || !stopwatch.laps().empty()) {
    return "a stopwatch with " + std::to_string(laps.size()) + " laps";
  }
  const std::size_t huge = std::size_t{1} << 50;
  const std::string all = std::to_string(cuda_device().memory);
  const std::string fault = expect_error(Status::out_of_memory,
                                         {"out of CUDA memory: " + std::to_string(huge) + " bytes were asked for",
                                          " of the " + all + " of ", cuda_device().name, "are free"},
                                         [huge] { const CudaMemory too_large(huge); });
  if (!fault.empty()) {
    return fault;
  }
  memory.copy_to(back.data(), 1);  // the failure is forgotten
  return expect_error(Status::invalid_argument, {"1001 bytes are to be copied; allowed: up to 1000"},
                      [&] { memory.copy_to(back.data(), 1001); });
}

}  // namespace distr::test
