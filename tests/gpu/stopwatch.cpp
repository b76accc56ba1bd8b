// SPDX-License-Identifier: Apache-2.0
#include "gpu/stopwatch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "distr/error.h"

namespace distr::test {
namespace {

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(status == cudaErrorMemoryAllocation ? Status::out_of_memory : Status::device_failure,
                std::string(what) + ": " + cudaGetErrorString(status));
  }
}

// A graph of `nodes` memsets, each with a call behind it.
class Graph {
 public:
  Graph(cudaStream_t stream, int nodes, const std::function<void(int)>& call) : stream_(stream), word_(4) {
    cudaGraph_t graph = nullptr;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int n = 0; n < nodes; ++n) {
      require(cudaMemsetAsync(word_.data(), 0, 4, stream), "cudaMemsetAsync");
      call(n);
    }
    require(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    require(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    require(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(graph_); }

  void launch() const { require(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch"); }

 private:
  cudaStream_t stream_;
  Memory word_;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

Memory::Memory(std::size_t bytes) {
  if (bytes > 0) {
    require(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
}

Memory::~Memory() { cudaFree(data_); }

Times measure(void* stream, double seconds, const std::function<void(int)>& call) {
  constexpr int kFewest = 5;
  constexpr int kMax = 50;
  constexpr int kWarmUp = 3;
  const auto on = static_cast<cudaStream_t>(stream);
  std::vector<cudaEvent_t> events(2);
  for (cudaEvent_t& event : events) {
    require(cudaEventCreate(&event), "cudaEventCreate");
  }
  const auto one = [&](int n) {
    float ms = 0;
    require(cudaEventRecord(events[0], on), "cudaEventRecord");
    call(n);
    require(cudaEventRecord(events[1], on), "cudaEventRecord");
    require(cudaEventSynchronize(events[1]), "cudaEventSynchronize");
    require(cudaEventElapsedTime(&ms, events[0], events[1]), "cudaEventElapsedTime");
    return ms;
  };
  float warm = 0;
  int calls = 0;
  for (; calls < kWarmUp; ++calls) {
    warm = one(calls);
  }
  const double wanted = seconds * 1e3 / std::max(warm, 1e-3F);
  const int runs = static_cast<int>(std::clamp<double>(wanted, kFewest, kMax));
  Times times;
  for (int n = 0; n < runs; ++n) {
    times.ms.push_back(one(calls++));
  }
  for (cudaEvent_t event : events) {
    require(cudaEventDestroy(event), "cudaEventDestroy");
  }
  std::sort(times.ms.begin(), times.ms.end());
  return times;
}

Times measure_in_graph(void* stream, double seconds, const std::function<void(int)>& call) {
  constexpr int kCalls = 32;
  const auto on = static_cast<cudaStream_t>(stream);
  call(0);  // what a first call does may not be captured
  require(cudaStreamSynchronize(on), "cudaStreamSynchronize");
  const Graph memsets(on, kCalls, [](int) {});
  const Graph calls(on, kCalls, call);
  const double empty = measure(stream, seconds / 4, [&](int) { memsets.launch(); }).median();
  Times times = measure(stream, seconds, [&](int) { calls.launch(); });
  for (float& ms : times.ms) {
    ms = static_cast<float>((ms - empty) / kCalls);
  }
  return times;
}

}  // namespace distr::test
