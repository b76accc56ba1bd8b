// SPDX-License-Identifier: Apache-2.0
#include "gpu/broken_kernels.h"

#include <cuda_runtime.h>

#include <cmath>
#include <utility>

namespace distr::test {
namespace {

// The kernel that the broken ones of its operation plan with.
template <class Kernel>
thread_local Kernel right;

template <class Tensors>
KernelPlan<Tensors> right_plan(const Problem& p, const Grouping& g, const Execution& execution) {
  return right<KernelEntry<Tensors>>.plan(p, g, execution);
}

// Of another problem.
template <class Tensors, class Change>
KernelPlan<Tensors> with_problem(const Problem& p, const Grouping& g, const Execution& execution,
                                 const Change& change) {
  Problem wrong = p;
  change(wrong);
  return right_plan<Tensors>(wrong, g, execution);
}

// Of another grouping.
template <class Tensors, class Change>
KernelPlan<Tensors> with_grouping(const Problem& p, const Grouping& g, const Execution& execution,
                                  const Change& change) {
  Grouping wrong = g;
  change(wrong);
  return right_plan<Tensors>(p, wrong, execution);
}

// The right plan, run otherwise: run(the right run, tensors, execution).
template <class Tensors, class Run>
KernelPlan<Tensors> with_run(const Problem& p, const Grouping& g, const Execution& execution, const Run& run) {
  KernelPlan<Tensors> plan = right_plan<Tensors>(p, g, execution);
  plan.run = [right_run = std::move(plan.run), run](const Tensors& tensors, const Execution& with) {
    run(right_run, tensors, with);
  };
  return plan;
}

template <class Tensors>
KernelPlan<Tensors> less_one_key(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_problem<Tensors>(p, g, execution, [](Problem& wrong) { wrong.seq_k -= 1; });
}

template <class Tensors>
KernelPlan<Tensors> less_the_last_row(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_problem<Tensors>(p, g, execution, [](Problem& wrong) { wrong.seq_q -= 1; });
}

template <class Tensors>
KernelPlan<Tensors> wrong_scale(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_problem<Tensors>(
      p, g, execution, [&](Problem& wrong) { wrong.scale = 1 / std::sqrt(static_cast<double>(num_groups(p, g))); });
}

template <class Tensors>
KernelPlan<Tensors> other_corner(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_problem<Tensors>(p, g, execution, [](Problem& wrong) { wrong.causal = Causal::top_left; });
}

template <class Tensors>
KernelPlan<Tensors> other_estimator(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_grouping<Tensors>(p, g, execution, [](Grouping& wrong) { wrong.estimator = Estimator::sample; });
}

template <class Tensors>
KernelPlan<Tensors> exact_instead(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_grouping<Tensors>(p, g, execution, [](Grouping& wrong) {
    wrong.strategy = Strategy::exact;
    wrong.group_size = 1;
  });
}

// Near keys end a tile too late.
template <class Tensors>
KernelPlan<Tensors> wrong_border(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_grouping<Tensors>(p, g, execution,
                                [](Grouping& wrong) { wrong.window = wrong.window.value_or(0) + 128; });
}

template <class Tensors>
KernelPlan<Tensors> on_the_default_stream(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_run<Tensors>(p, g, execution, [](const auto& run, const Tensors& tensors, const Execution& with) {
    Execution wrong = with;
    wrong.stream = nullptr;
    run(tensors, wrong);
    cudaStreamSynchronize(nullptr);
  });
}

// Sets bytes of an output, at an offset from its beginning.
void spoil(void* output, std::int64_t offset, std::size_t bytes, const Execution& execution) {
  cudaMemsetAsync(static_cast<std::byte*>(output) + offset, 0, bytes, static_cast<cudaStream_t>(execution.stream));
}

// The right run, and then an output is spoiled.
template <class Tensors>
KernelPlan<Tensors> spoiling(const Problem& p, const Grouping& g, const Execution& execution, void* Tensors::*output,
                             std::int64_t offset, std::size_t bytes = 1) {
  return with_run<Tensors>(p, g, execution, [=](const auto& run, const Tensors& tensors, const Execution& with) {
    run(tensors, with);
    spoil(tensors.*output, offset, bytes, with);
  });
}

// Halves that hold a key above the threshold are skipped, or none are.
KernelPlan<ForwardTensors> skips_too_much(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_grouping<ForwardTensors>(p, g, execution, [](Grouping& wrong) { wrong.skip = 0.999; });
}

KernelPlan<ForwardTensors> skips_nothing(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_grouping<ForwardTensors>(p, g, execution, [](Grouping& wrong) { wrong.skip = 1e-30; });
}

KernelPlan<ForwardTensors> does_not_finish(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_grouping<ForwardTensors>(p, g, execution, [](Grouping& wrong) { wrong.finish = false; });
}

KernelPlan<ForwardTensors> writes_beside(const Problem& p, const Grouping& g, const Execution& execution) {
  return spoiling(p, g, execution, &ForwardTensors::o, -1);
}

KernelPlan<ForwardTensors> writes_between_rows(const Problem& p, const Grouping& g, const Execution& execution) {
  return spoiling(p, g, execution, &ForwardTensors::o, p.head_dim_v * static_cast<std::int64_t>(size_of(p.dtype)));
}

KernelPlan<ForwardTensors> one_wrong_number(const Problem& p, const Grouping& g, const Execution& execution) {
  return spoiling(p, g, execution, &ForwardTensors::o, 0, size_of(p.dtype));
}

KernelPlan<BackwardTensors> writes_beside_dk(const Problem& p, const Grouping& g, const Execution& execution) {
  return spoiling(p, g, execution, &BackwardTensors::d_k, -1);
}

KernelPlan<BackwardTensors> without_lse_gradient(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_run<BackwardTensors>(p, g, execution, [](const auto& run, BackwardTensors wrong, const Execution& with) {
    wrong.d_lse = nullptr;
    run(wrong, with);
  });
}

KernelPlan<BackwardTensors> without_mask_gradient(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_run<BackwardTensors>(p, g, execution, [](const auto& run, BackwardTensors wrong, const Execution& with) {
    wrong.d_mask = nullptr;
    run(wrong, with);
  });
}

KernelPlan<GroupingTensors> another_seed(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_grouping<GroupingTensors>(p, g, execution, [](Grouping& wrong) { wrong.seed += 1; });
}

KernelPlan<GroupingTensors> own_rows(const Problem& p, const Grouping& g, const Execution& execution) {
  return with_grouping<GroupingTensors>(p, g, execution, [](Grouping& wrong) { wrong.order_from = OrderFrom::own; });
}

template <class Tensors>
struct Defect {
  const char* what;
  const char* case_name;
  decltype(KernelEntry<Tensors>::plan) plan;
};

template <class Tensors, std::size_t kCount>
std::vector<BrokenKernel<KernelEntry<Tensors>>> with_defects(const KernelEntry<Tensors>& kernel,
                                                             const Defect<Tensors> (&defects)[kCount]) {
  right<KernelEntry<Tensors>> = kernel;
  std::vector<BrokenKernel<KernelEntry<Tensors>>> result;
  for (const Defect<Tensors>& defect : defects) {
    KernelEntry<Tensors> wrong = kernel;
    wrong.plan = defect.plan;
    result.push_back({defect.what, defect.case_name, wrong});
  }
  return result;
}

}  // namespace

std::vector<BrokenKernel<GroupingKernel>> broken_kernels(const GroupingKernel& kernel) {
  const Defect<GroupingTensors> defects[] = {{"another seed", "lsh, mean", another_seed},
                                             {"the block's own rows", "lsh, previous", own_rows},
                                             {"the block's own rows", "energy, previous", own_rows},
                                             {"less one key", "energy, one column", less_one_key},
                                             {"means of all keys", "near, given, causal, previous", own_rows},
                                             {"means of less one key", "near, given", less_one_key},
                                             {"means of less one key", "near, energy, one column", less_one_key},
                                             {"on the default stream", "energy", on_the_default_stream},
                                             {"on the default stream", "lsh, mean", on_the_default_stream}};
  return with_defects(kernel, defects);
}

std::vector<BrokenKernel<ForwardKernel>> broken_kernels(const ForwardKernel& kernel) {
  const Defect<ForwardTensors> defects[] = {
      {"less one key", "odd sizes", less_one_key},
      {"less the last row", "GQA", less_the_last_row},
      {"a wrong scale", "lsh, mean", wrong_scale},
      {"the other corner", "causal bottom-right, more keys", other_corner},
      {"the other estimator", "lsh, mean", other_estimator},
      {"exact instead of grouped", "energy, G 4", exact_instead},
      {"a wrong border of near keys", "near, given", wrong_border},
      {"a wrong border of near keys", "near, lsh, window 100, sinks", wrong_border},
      {"skips what is to be kept", "skip, energy, one block", skips_too_much},
      {"keeps what is to be skipped", "skip, energy, one block", skips_nothing},
      {"keeps approximate scores", "skip, energy, finish, G 4", does_not_finish},
      {"on the default stream", "GQA", on_the_default_stream},
      {"writes beside O", "GQA", writes_beside},
      {"writes between rows of O", "gaps between rows", writes_between_rows},
      {"one wrong number", "causal, square", one_wrong_number}};
  return with_defects(kernel, defects);
}

std::vector<BrokenKernel<BackwardKernel>> broken_kernels(const BackwardKernel& kernel) {
  const Defect<BackwardTensors> defects[] = {
      {"less one key", "odd sizes", less_one_key},
      {"less the last row", "GQA", less_the_last_row},
      {"a wrong scale", "lsh, mean", wrong_scale},
      {"the other corner", "causal bottom-right, more keys", other_corner},
      {"the other estimator", "lsh, mean", other_estimator},
      {"exact instead of grouped", "energy, G 4", exact_instead},
      {"a wrong border of near keys", "near, given", wrong_border},
      {"on the default stream", "GQA", on_the_default_stream},
      {"writes beside dK", "GQA", writes_beside_dk},
      {"without the gradient of LSE", "odd sizes", without_lse_gradient},
      {"without the gradient of the mask", "additive mask", without_mask_gradient}};
  return with_defects(kernel, defects);
}

}  // namespace distr::test
