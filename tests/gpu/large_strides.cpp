// SPDX-License-Identifier: Apache-2.0
#include "gpu/large_strides.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "distr/device.h"
#include "gpu/device_run.h"
#include "gpu/properties.h"
#include "support/cases.h"

namespace distr::test {
namespace {

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Fault(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

// Q, K and V of one head and of as many rows beside each other, rows `stride` elements apart.
class LargeStrides {
 public:
  LargeStrides(const Instance& instance, std::int64_t stride)
      : problem_(instance.test_case.problem), grouping_(instance.test_case.grouping), instance_(instance) {
    const auto element = static_cast<std::int64_t>(size_of(problem_.dtype));
    const std::int64_t columns = problem_.head_dim;
    memory_ = CudaMemory(static_cast<std::size_t>(((problem_.seq_k - 1) * stride + 3 * columns) * element));
    const void* const sources[] = {instance.q_data(), instance.k_data(), instance.v_data()};
    for (std::int64_t tensor = 0; tensor < 3; ++tensor) {
      data_[tensor] = static_cast<std::byte*>(memory_.data()) + tensor * columns * element;
      const auto* const from = static_cast<const std::byte*>(sources[tensor]);
      for (std::int64_t row = 0; row < problem_.seq_k; ++row) {
        require(cudaMemcpyAsync(data_[tensor] + row * stride * element, from + row * columns * element,
                                static_cast<std::size_t>(columns * element), cudaMemcpyHostToDevice, stream_),
                "cudaMemcpyAsync");
      }
    }
    problem_.q.row = problem_.k.row = problem_.v.row = stride;
  }

  // O, whose rows are contiguous.
  [[nodiscard]] Buffer run(const ForwardKernel& kernel) const {
    Buffer result = instance_.output();
    CudaMemory order(instance_.order.size() * sizeof(std::int32_t) + 1);
    CudaMemory o(static_cast<std::size_t>(result.count()) * size_of(problem_.dtype));
    order.copy_from(instance_.order.data(), order.bytes() - 1, stream_);
    o.copy_from(result.data(), o.bytes(), stream_);  // poison
    Execution execution = on_device();
    const KernelPlan<ForwardTensors> plan = kernel.plan(problem_, grouping_, execution);
    execution.workspace_bytes = plan.workspace.bytes();
    const CudaMemory workspace(execution.workspace_bytes + 1);
    execution.workspace = workspace.data();
    ForwardTensors tensors{data_[0], data_[1], data_[2], nullptr};
    tensors.order = static_cast<const std::int32_t*>(order.data());
    tensors.o = o.data();
    plan.run(tensors, execution);
    o.copy_to(result.data(), o.bytes(), stream_);
    return result;
  }

  [[nodiscard]] bool is_served_by(const ForwardKernel& kernel) const {
    return kernel.supports(problem_, grouping_).empty();
  }

 private:
  Problem problem_;
  Grouping grouping_;
  const Instance& instance_;
  cudaStream_t stream_ = thread_stream();
  CudaMemory memory_;
  std::byte* data_[3];
};

}  // namespace

std::string check_large_strides(const ForwardKernel& kernel, DType dtype) {
  constexpr std::int64_t kRows = 70;
  bool asked = false;
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh}) {
    Case test_case;
    test_case.problem.dtype = dtype;
    test_case.problem.seq_q = test_case.problem.seq_k = kRows;
    test_case.problem.head_dim = test_case.problem.head_dim_v = 64;
    test_case.problem = contiguous(test_case.problem);
    test_case.grouping.strategy = strategy;
    test_case.grouping.group_size = strategy == Strategy::exact ? 1 : 2;
    if (size_of(dtype) > 2 || !kernel.supports(test_case.problem, test_case.grouping).empty()) {
      continue;
    }
    Instance instance(test_case);
    ForwardTensors tensors = instance.forward();
    tensors.lse = nullptr;
    run_on_device(kernel, test_case.problem, test_case.grouping, tensors);
    for (const std::int64_t stride : {(std::int64_t{1} << 24) - 8, std::int64_t{1} << 24}) {
      const LargeStrides far(instance, stride);
      if (!far.is_served_by(kernel)) {
        continue;
      }
      asked = true;
      if (!(far.run(kernel) == instance.o)) {
        return std::string(strategy == Strategy::lsh ? "lsh" : "exact") + ": O of rows " + std::to_string(stride) +
               " elements apart differs";
      }
    }
  }
  return asked ? "" : kNotAsked;
}

}  // namespace distr::test
