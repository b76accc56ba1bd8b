// SPDX-License-Identifier: Apache-2.0
#include "gpu/wrong.h"

#include <cuda_runtime.h>

#include <cmath>

namespace distr::test {
namespace {

// The kernel that the twins of its operation call.
template <class Kernel>
thread_local Kernel right;

template <class Tensors>
void call(const Problem& p, const Grouping& g, const Tensors& tensors, const Execution& execution) {
  right<KernelEntry<Tensors>>.run(p, g, tensors, execution);
}

template <class Tensors>
void less_one_key(const Problem& p, const Grouping& g, const Tensors& tensors, const Execution& execution) {
  Problem wrong = p;
  wrong.seq_k -= 1;
  call(wrong, g, tensors, execution);
}

template <class Tensors>
void less_the_last_row(const Problem& p, const Grouping& g, const Tensors& tensors, const Execution& execution) {
  Problem wrong = p;
  wrong.seq_q -= 1;
  call(wrong, g, tensors, execution);
}

template <class Tensors>
void wrong_scale(const Problem& p, const Grouping& g, const Tensors& tensors, const Execution& execution) {
  Problem wrong = p;
  wrong.scale = 1 / std::sqrt(static_cast<double>(num_groups(p, g)));
  call(wrong, g, tensors, execution);
}

template <class Tensors>
void other_corner(const Problem& p, const Grouping& g, const Tensors& tensors, const Execution& execution) {
  Problem wrong = p;
  wrong.causal = Causal::top_left;
  call(wrong, g, tensors, execution);
}

template <class Tensors>
void other_estimator(const Problem& p, const Grouping& g, const Tensors& tensors, const Execution& execution) {
  Grouping wrong = g;
  wrong.estimator = Estimator::sample;
  call(p, wrong, tensors, execution);
}

template <class Tensors>
void exact_instead(const Problem& p, const Grouping& g, const Tensors& tensors, const Execution& execution) {
  Grouping wrong = g;
  wrong.strategy = Strategy::exact;
  wrong.group_size = 1;
  call(p, wrong, tensors, execution);
}

template <class Tensors>
void on_the_default_stream(const Problem& p, const Grouping& g, const Tensors& tensors, const Execution& execution) {
  Execution wrong = execution;
  wrong.stream = nullptr;
  call(p, g, tensors, wrong);
  cudaStreamSynchronize(nullptr);
}

// Sets one byte of an output, at an offset from its beginning.
void spoil(void* output, std::int64_t offset, const Execution& execution) {
  cudaMemsetAsync(static_cast<std::byte*>(output) + offset, 0, 1, static_cast<cudaStream_t>(execution.stream));
}

void writes_beside(const Problem& p, const Grouping& g, const ForwardTensors& tensors, const Execution& execution) {
  call(p, g, tensors, execution);
  spoil(tensors.o, -1, execution);
}

void writes_between_rows(const Problem& p, const Grouping& g, const ForwardTensors& tensors,
                         const Execution& execution) {
  call(p, g, tensors, execution);
  spoil(tensors.o, p.head_dim_v * static_cast<std::int64_t>(size_of(p.dtype)), execution);
}

void one_wrong_number(const Problem& p, const Grouping& g, const ForwardTensors& tensors, const Execution& execution) {
  call(p, g, tensors, execution);
  cudaMemsetAsync(tensors.o, 0, size_of(p.dtype), static_cast<cudaStream_t>(execution.stream));
}

void without_lse_gradient(const Problem& p, const Grouping& g, const BackwardTensors& tensors,
                          const Execution& execution) {
  BackwardTensors wrong = tensors;
  wrong.d_lse = nullptr;
  call(p, g, wrong, execution);
}

void without_mask_gradient(const Problem& p, const Grouping& g, const BackwardTensors& tensors,
                           const Execution& execution) {
  BackwardTensors wrong = tensors;
  wrong.d_mask = nullptr;
  call(p, g, wrong, execution);
}

void writes_beside_dk(const Problem& p, const Grouping& g, const BackwardTensors& tensors, const Execution& execution) {
  call(p, g, tensors, execution);
  spoil(tensors.d_k, -1, execution);
}

void another_seed(const Problem& p, const Grouping& g, const GroupingTensors& tensors, const Execution& execution) {
  Grouping wrong = g;
  wrong.seed += 1;
  call(p, wrong, tensors, execution);
}

void own_rows(const Problem& p, const Grouping& g, const GroupingTensors& tensors, const Execution& execution) {
  Grouping wrong = g;
  wrong.order_from = OrderFrom::own;
  call(p, wrong, tensors, execution);
}

template <class Tensors>
using Run = void (*)(const Problem&, const Grouping&, const Tensors&, const Execution&);

template <class Tensors>
struct Twin {
  const char* what;
  const char* case_name;
  Run<Tensors> run;
};

template <class Tensors, std::size_t kCount>
std::vector<Wrong<KernelEntry<Tensors>>> twins_of(const KernelEntry<Tensors>& kernel,
                                                  const Twin<Tensors> (&twins)[kCount]) {
  right<KernelEntry<Tensors>> = kernel;
  std::vector<Wrong<KernelEntry<Tensors>>> result;
  for (const Twin<Tensors>& twin : twins) {
    KernelEntry<Tensors> wrong = kernel;
    wrong.run = twin.run;
    result.push_back({twin.what, twin.case_name, wrong});
  }
  return result;
}

}  // namespace

std::vector<Wrong<GroupingKernel>> wrong_kernels(const GroupingKernel& kernel) {
  const Twin<GroupingTensors> twins[] = {{"another seed", "lsh, mean", another_seed},
                                         {"the block's own rows", "lsh, previous", own_rows},
                                         {"the block's own rows", "energy, previous", own_rows},
                                         {"less one key", "energy, one column", less_one_key},
                                         {"on the default stream", "energy", on_the_default_stream},
                                         {"on the default stream", "lsh, mean", on_the_default_stream}};
  return twins_of(kernel, twins);
}

std::vector<Wrong<ForwardKernel>> wrong_kernels(const ForwardKernel& kernel) {
  const Twin<ForwardTensors> twins[] = {{"less one key", "odd sizes", less_one_key},
                                        {"less the last row", "GQA", less_the_last_row},
                                        {"a wrong scale", "lsh, mean", wrong_scale},
                                        {"the other corner", "causal bottom-right, more keys", other_corner},
                                        {"the other estimator", "lsh, mean", other_estimator},
                                        {"exact instead of grouped", "energy, G 4", exact_instead},
                                        {"on the default stream", "GQA", on_the_default_stream},
                                        {"writes beside O", "GQA", writes_beside},
                                        {"writes between rows of O", "gaps between rows", writes_between_rows},
                                        {"one wrong number", "causal, square", one_wrong_number}};
  return twins_of(kernel, twins);
}

std::vector<Wrong<BackwardKernel>> wrong_kernels(const BackwardKernel& kernel) {
  const Twin<BackwardTensors> twins[] = {{"less one key", "odd sizes", less_one_key},
                                         {"less the last row", "GQA", less_the_last_row},
                                         {"a wrong scale", "lsh, mean", wrong_scale},
                                         {"the other corner", "causal bottom-right, more keys", other_corner},
                                         {"the other estimator", "lsh, mean", other_estimator},
                                         {"exact instead of grouped", "energy, G 4", exact_instead},
                                         {"on the default stream", "GQA", on_the_default_stream},
                                         {"writes beside dK", "GQA", writes_beside_dk},
                                         {"without the gradient of LSE", "odd sizes", without_lse_gradient},
                                         {"without the gradient of the mask", "additive mask", without_mask_gradient}};
  return twins_of(kernel, twins);
}

}  // namespace distr::test
