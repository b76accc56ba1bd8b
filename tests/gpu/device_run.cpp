// SPDX-License-Identifier: Apache-2.0
#include "gpu/device_run.h"
#include "common/gradient_strides.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "gpu/elements.h"

namespace distr::test {
namespace {

constexpr std::size_t kMargin = 512;  // bytes of canary on each side
constexpr int kPoison = 0xFF;         // 0xFFFF..: NaN in every type

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw DeviceDead(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

cudaStream_t make_stream(unsigned flags) {
  cudaStream_t created = nullptr;
  require(cudaStreamCreateWithFlags(&created, flags), "cudaStreamCreateWithFlags");
  return created;
}

// One that does: while it captures, whatever is put on the default stream by accident fails.
cudaStream_t capturing_stream() {
  thread_local const cudaStream_t own = make_stream(cudaStreamDefault);
  return own;
}

std::atomic<bool> workspace_is_poisoned = true;

// Device memory with canaries around `bytes` bytes, poisoned if wanted; `data` is as far from a multiple of 16 as asked
// for.
class DeviceMemory {
 public:
  DeviceMemory(std::size_t bytes, std::size_t margin, std::size_t misalignment, bool poisoned = true)
      : bytes_(bytes), margin_(margin), front_(margin + misalignment) {
    const std::size_t all = std::max<std::size_t>(front_ + bytes_ + margin_, 16);
    require(cudaMalloc(reinterpret_cast<void**>(&base_), all), "cudaMalloc");
    const auto poison = [&](std::size_t from, std::size_t to) {
      require(cudaMemsetAsync(base_ + from, kPoison, to - from, thread_stream()), "cudaMemsetAsync");
    };
    if (poisoned) {
      poison(0, all);
    } else {
      poison(0, front_);
      poison(front_ + bytes_, all);
    }
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(base_); }

  [[nodiscard]] std::byte* data() const { return base_ + front_; }
  void upload(const void* source) const {
    if (bytes_ > 0) {
      require(cudaMemcpyAsync(data(), source, bytes_, cudaMemcpyHostToDevice, thread_stream()), "cudaMemcpyAsync");
      require(cudaStreamSynchronize(thread_stream()), "cudaStreamSynchronize");
    }
  }
  // What it holds; throws Fault unless the canaries are intact.
  [[nodiscard]] std::vector<std::byte> download(const std::string& name) const {
    std::vector<std::byte> all(front_ + bytes_ + margin_);
    require(cudaMemcpyAsync(all.data(), base_, all.size(), cudaMemcpyDeviceToHost, thread_stream()), "cudaMemcpyAsync");
    require(cudaStreamSynchronize(thread_stream()), "cudaStreamSynchronize");
    const auto require_poison = [&](std::size_t from, std::size_t to) {
      for (std::size_t n = from; n < to; ++n) {
        if (all[n] != std::byte{kPoison}) {
          throw Fault("wrote beside " + name + ", at byte " +
                      std::to_string(static_cast<std::ptrdiff_t>(n) - static_cast<std::ptrdiff_t>(front_)) + " of " +
                      std::to_string(bytes_));
        }
      }
    };
    require_poison(0, front_);
    require_poison(front_ + bytes_, all.size());
    return {all.begin() + static_cast<std::ptrdiff_t>(front_),
            all.begin() + static_cast<std::ptrdiff_t>(front_ + bytes_)};
  }

 private:
  std::size_t bytes_, margin_, front_;
  std::byte* base_ = nullptr;
};

// One call at a time has the device, so that a device that dies is the fault of the call that has it: the others wait
// for the end of the process.
class Turn {
 public:
  Turn() : lock_(mutex_) {
    while (dead_) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }
  // Runs `call` and finds out whether the device outlives it.
  template <class Call>
  void take(const std::string& kernel, const Call& call) {
    try {
      call();
    } catch (const DeviceDead& error) {
      dead_ = true;
      throw DeviceDead(kernel + ": " + error.what());
    } catch (const Error& error) {
      const cudaError_t status = cudaStreamSynchronize(thread_stream());
      dead_ = status != cudaSuccess;
      if (dead_) {
        throw DeviceDead(kernel + ": " + error.what() + "; then " + cudaGetErrorString(status));
      }
      throw;
    }
  }

 private:
  static inline std::mutex mutex_;
  static inline bool dead_ = false;
  std::lock_guard<std::mutex> lock_;
};

// The tensors of one call, on the device.
class Session {
 public:
  explicit Session(bool deterministic) : deterministic_(deterministic) {}

  const void* input(const void* host, const Elements& elements, const char* name) {
    return place(const_cast<void*>(host), elements, name, 0);
  }
  void* output(void* host, const Elements& elements, const char* name) { return place(host, elements, name, kMargin); }
  // An output that is the same in every run only if the kernel is deterministic.
  void* sum(void* host, const Elements& elements, const char* name) {
    void* const device = output(host, elements, name);
    if (device != nullptr) {
      tensors_.back().repeats = deterministic_;
    }
    return device;
  }

  // `call` in a workspace of so many bytes; two runs of one plan.
  template <class Run>
  void run(std::size_t workspace_bytes, const Run& call) {
    const bool poisoned = workspace_is_poisoned;
    const DeviceMemory workspace(workspace_bytes, kMargin, 0, poisoned);
    Execution execution = on_device();
    execution.workspace = workspace_bytes == 0 ? nullptr : workspace.data();
    execution.workspace_bytes = workspace_bytes;
    call(execution);
    finish("the kernel");
    const auto first = download();
    if (poisoned) {
      static_cast<void>(workspace.download("the workspace"));
    }

    for (const Tensor& tensor : tensors_) {
      tensor.memory->upload(tensor.bytes());
    }
    if (poisoned) {
      const std::vector<std::byte> poison(workspace_bytes, std::byte{kPoison});
      workspace.upload(poison.data());
    }
    execution.stream = capturing_stream();
    replay([&] { call(execution); });
    const auto second = download();
    for (std::size_t n = 0; n < tensors_.size(); ++n) {
      if (tensors_[n].repeats && second[n] != first[n]) {
        throw Fault("two runs differ in " + tensors_[n].name +
                    ": not deterministic, or not the same out of a captured graph");
      }
      keep(tensors_[n], second[n]);
    }
  }

 private:
  struct Tensor {
    [[nodiscard]] std::byte* bytes() const {
      return static_cast<std::byte*>(host) + elements.low * static_cast<std::int64_t>(elements.element);
    }
    void* host;
    Elements elements;
    std::string name;
    std::unique_ptr<DeviceMemory> memory;
    bool writable;
    bool repeats = true;
  };

  void* place(void* host, const Elements& elements, const char* name, std::size_t margin) {
    if (host == nullptr) {
      return nullptr;
    }
    Tensor tensor{host, elements, name, nullptr, margin > 0};
    const std::size_t misalignment = reinterpret_cast<std::uintptr_t>(tensor.bytes()) % 16;
    tensor.memory = std::make_unique<DeviceMemory>(elements.bytes(), margin, misalignment);
    tensor.memory->upload(tensor.bytes());
    tensors_.push_back(std::move(tensor));
    return tensors_.back().memory->data() - elements.low * static_cast<std::int64_t>(elements.element);
  }

  static void finish(const char* what) {
    require(cudaGetLastError(), what);
    require(cudaStreamSynchronize(thread_stream()), what);
  }

  [[nodiscard]] std::vector<std::vector<std::byte>> download() const {
    std::vector<std::vector<std::byte>> all;
    for (const Tensor& tensor : tensors_) {
      all.push_back(tensor.memory->download(tensor.name));
    }
    return all;
  }

  template <class Call>
  static void replay(const Call& call) {
    cudaGraph_t graph = nullptr;
    require(cudaStreamBeginCapture(capturing_stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      call();
    } catch (const Error& error) {
      cudaStreamEndCapture(capturing_stream(), &graph);
      cudaGetLastError();
      throw Fault(std::string("cannot be captured: ") + error.what());
    }
    const cudaError_t status = cudaStreamEndCapture(capturing_stream(), &graph);
    if (status != cudaSuccess) {
      cudaGetLastError();
      throw Fault(std::string("cannot be captured: ") + cudaGetErrorString(status));
    }
    cudaGraphExec_t executable = nullptr;
    require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    require(cudaGraphLaunch(executable, thread_stream()), "cudaGraphLaunch");
    finish("the captured kernel");
    require(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    require(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }

  // Inputs must be what they were; so must what lies between the elements of an output.
  static void keep(const Tensor& tensor, const std::vector<std::byte>& now) {
    if (!tensor.writable) {
      if (!now.empty() && std::memcmp(now.data(), tensor.bytes(), now.size()) != 0) {
        throw Fault("wrote to its input " + tensor.name);
      }
      return;
    }
    const std::vector<bool> covered = tensor.elements.covered();
    const std::size_t element = tensor.elements.element;
    for (std::size_t n = 0; n < covered.size(); ++n) {
      if (!covered[n] && std::memcmp(now.data() + n * element, tensor.bytes() + n * element, element) != 0) {
        throw Fault("wrote between the elements of " + tensor.name);
      }
    }
    std::copy(now.begin(), now.end(), tensor.bytes());
  }

  bool deterministic_;
  std::vector<Tensor> tensors_;
};

// What forward and backward read alike.
template <class Tensors>
Tensors place_inputs(Session& session, const Problem& p, const Grouping& g, const Tensors& host) {
  Tensors device;
  device.q = session.input(host.q, elements(p, p.q, p.heads_q, query_rows(p), p.head_dim), "Q");
  device.k = session.input(host.k, elements(p, p.k, p.heads_kv, key_rows(p), p.head_dim), "K");
  device.v = session.input(host.v, elements(p, p.v, p.heads_kv, key_rows(p), p.head_dim_v), "V");
  const auto lengths = [&](const std::int32_t* from, std::int64_t count, const char* name) {
    return static_cast<const std::int32_t*>(session.input(from, {{{count, 1}}, sizeof(std::int32_t)}, name));
  };
  device.lengths = {lengths(host.lengths.keys, p.batch, "the lengths of the keys"),
                    lengths(host.lengths.starts_q, p.batch + 1, "the starts of the sequences of Q"),
                    lengths(host.lengths.starts_k, p.batch + 1, "the starts of the sequences of K")};
  if (p.mask.kind != MaskKind::none) {
    device.mask = session.input(host.mask, mask_elements(p, false), "the mask");
  }
  if (!is_exact(g)) {
    device.order = static_cast<const std::int32_t*>(session.input(host.order, order_elements(p, g), "the order"));
  }
  if (needs_key_means(g)) {
    device.key_means =
        static_cast<const float*>(session.input(host.key_means, key_means_elements(p, g), "the means of the keys"));
  }
  return device;
}

GroupingTensors place(Session& session, const Problem& p, const Grouping& g, const GroupingTensors& host) {
  GroupingTensors device;
  device.q = session.input(host.q, elements(p, p.q, p.heads_q, query_rows(p), p.head_dim), "Q");
  device.k = session.input(host.k, elements(p, p.k, p.heads_kv, key_rows(p), p.head_dim), "K");
  device.order = static_cast<std::int32_t*>(session.output(host.order, order_elements(p, g), "the order"));
  if (needs_key_means(g)) {
    device.key_means =
        static_cast<float*>(session.output(host.key_means, key_means_elements(p, g), "the means of the keys"));
  }
  return device;
}

ForwardTensors place(Session& session, const Problem& p, const Grouping& g, const ForwardTensors& host) {
  ForwardTensors device = place_inputs(session, p, g, host);
  device.o = session.output(host.o, elements(p, p.o, p.heads_q, query_rows(p), p.head_dim_v), "O");
  device.lse = session.output(host.lse, rows_of(p), "LSE");
  device.halves = static_cast<std::int32_t*>(session.output(host.halves, halves_elements(p), "the counts of halves"));
  return device;
}

BackwardTensors place(Session& session, const Problem& p, const Grouping& g, const BackwardTensors& host) {
  BackwardTensors device = place_inputs(session, p, g, host);
  const Elements o = elements(p, p.o, p.heads_q, query_rows(p), p.head_dim_v);
  device.o = session.input(host.o, o, "O");
  device.lse = session.input(host.lse, rows_of(p), "LSE");
  device.d_o = session.input(host.d_o, o, "dO");
  device.d_lse = session.input(host.d_lse, rows_of(p), "dLSE");
  const auto [d_q, d_k, d_v] = common::gradient_strides(p);
  device.d_q = session.sum(host.d_q, elements(p, d_q, p.heads_q, query_rows(p), p.head_dim), "dQ");
  device.d_k = session.output(host.d_k, elements(p, d_k, p.heads_kv, key_rows(p), p.head_dim), "dK");
  device.d_v = session.output(host.d_v, elements(p, d_v, p.heads_kv, key_rows(p), p.head_dim_v), "dV");
  device.d_mask = session.output(host.d_mask, mask_elements(p, true), "dMask");
  return device;
}

template <class Tensors>
void run(const KernelEntry<Tensors>& kernel, const Problem& p, const Grouping& g, const Tensors& host) {
  if (is_empty(p, host)) {
    return;
  }
  Turn().take(kernel.name, [&] {
    Session session(kernel.deterministic);
    const Tensors device = place(session, p, g, host);
    const KernelPlan<Tensors> plan = kernel.plan(p, g, on_device());
    session.run(plan.workspace.bytes(), [&](const Execution& execution) { plan.run(device, execution); });
  });
}

}  // namespace

cudaStream_t thread_stream() {
  thread_local const cudaStream_t own = make_stream(cudaStreamNonBlocking);
  return own;
}

Execution on_device() {
  Execution execution;
  execution.device = Device::cuda;
  execution.threads = 1;
  execution.stream = thread_stream();
  return execution;
}

void leave_workspace_uninitialized() { workspace_is_poisoned = false; }

void run_on_device(const GroupingKernel& kernel, const Problem& p, const Grouping& g, const GroupingTensors& tensors) {
  run(kernel, p, g, tensors);
}

void run_on_device(const ForwardKernel& kernel, const Problem& p, const Grouping& g, const ForwardTensors& tensors) {
  run(kernel, p, g, tensors);
}

void run_on_device(const BackwardKernel& kernel, const Problem& p, const Grouping& g, const BackwardTensors& tensors) {
  run(kernel, p, g, tensors);
}

}  // namespace distr::test
