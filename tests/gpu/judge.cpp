// SPDX-License-Identifier: Apache-2.0
#include "gpu/judge.h"

#include <limits>
#include <vector>

#include "gpu/device_run.h"
#include "gpu/properties.h"
#include "support/check_order.h"
#include "support/oracle.h"

namespace distr::test {
namespace {

// The kernel that this thread has under test: check_forward() and check_backward() take plain functions.
thread_local const ForwardKernel* tested_forward = nullptr;
thread_local const BackwardKernel* tested_backward = nullptr;

void run_tested_forward(const Problem& p, const Grouping& g, const ForwardTensors& tensors, const Execution&) {
  run_on_device(*tested_forward, p, g, tensors);
}
void run_tested_backward(const Problem& p, const Grouping& g, const BackwardTensors& tensors, const Execution&) {
  run_on_device(*tested_backward, p, g, tensors);
}

template <LengthsAs kKind>
void run_tested_forward_with_lengths(const Problem& p, const Grouping& g, const ForwardTensors& tensors,
                                     const Execution&) {
  const WithLengths<ForwardTensors> call(kKind, p, tensors);
  run_on_device(*tested_forward, call.problem(), g, call.tensors());
  call.take_results();
}
void run_tested_backward_with_lengths(const Problem& p, const Grouping& g, const BackwardTensors& tensors,
                                      const Execution&) {
  const WithLengths<BackwardTensors> call(LengthsAs::packed, p, tensors);
  run_on_device(*tested_backward, call.problem(), g, call.tensors());
  call.take_results();
}

}  // namespace

std::string judge_with_lengths(const ForwardKernel& kernel, LengthsAs kind, Instance instance) {
  tested_forward = &kernel;
  return check_forward(kind == LengthsAs::keys ? run_tested_forward_with_lengths<LengthsAs::keys>
                                               : run_tested_forward_with_lengths<LengthsAs::packed>,
                       instance);
}
std::string judge_with_lengths(const BackwardKernel& kernel, LengthsAs /*kind*/, Instance instance) {
  tested_backward = &kernel;
  return check_backward(run_tested_backward_with_lengths, instance);
}

std::string judge(const GroupingKernel& kernel, Instance instance) {
  std::vector<std::int32_t> order(instance.order.size(), -1);
  std::vector<float> key_means(instance.key_means.size(), -1.0F);
  run_on_device(kernel, instance.test_case.problem, instance.test_case.grouping,
                {instance.q_data(), instance.k_data(), order.data(), key_means.data()});
  return check_grouping(instance, order, key_means);
}
std::string judge(const ForwardKernel& kernel, Instance instance) {
  tested_forward = &kernel;
  if (rounds_the_scale(kernel.name, instance.test_case)) {
    Instance alone = instance;
    const std::string fault = check_forward_without_lse(run_tested_forward, alone, Precision::plain_with_scale);
    if (!fault.empty()) {
      return "without LSE: " + fault;
    }
  }
  return check_forward(run_tested_forward, instance);
}
std::string judge_large_values(const ForwardKernel& kernel, Instance instance) {
  tested_forward = &kernel;
  return check_forward_of_large_values(run_tested_forward, instance);
}
std::string judge(const BackwardKernel& kernel, Instance instance) {
  tested_backward = &kernel;
  return check_backward(run_tested_backward, instance);
}

std::string judge_own(const BackwardKernel& kernel, Instance instance) {
  for (const ForwardKernel& forward : cuda_backend().forward) {
    tested_forward = std::string(forward.name) == "plain/forward" ? &forward : tested_forward;
  }
  tested_backward = &kernel;
  return check_own_backward(run_tested_forward, run_tested_backward, instance,
                            needs_finite_values(kernel.name) ? std::numeric_limits<double>::infinity() : 0);
}

}  // namespace distr::test
