// SPDX-License-Identifier: Apache-2.0
// All tasks of a backward. This file is included once for each instruction set.
#if defined(DISTR_CPU_BACKWARD_TASKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_BACKWARD_TASKS_INL_H_
#undef DISTR_CPU_BACKWARD_TASKS_INL_H_
#else
#define DISTR_CPU_BACKWARD_TASKS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "common/parallel.h"
#include "cpu/backward_tiling.h"
#include "cpu/key_strip-inl.h"
#include "cpu/mask_gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

template <class T, class Arithmetic>
void backward_of(const Problem& problem, const Grouping& grouping, const BackwardTiling& tiling,
                 const BackwardTensors& tensors, const Execution& execution) {
  auto* workspace = static_cast<float*>(execution.workspace);
  float* d = workspace + tiling.d_at();
  float* scratches = workspace + tiling.shared_floats();
  std::fill_n(reinterpret_cast<std::int32_t*>(workspace + tiling.turns_at()), tiling.num_tiles(), 0);
  Execution of_d = execution;
  of_d.progress = nullptr;                  // the strips' tasks are what is counted
  if (tiling.num_tiles() < kEnoughTasks) {  // so little that to start threads would take longer
    of_d.threads = 1;
  }
  common::parallel_for(of_d, tiling.num_tiles(), [&](std::int64_t index, int /*thread*/) {
    write_d<T>(problem, tensors, tiling.tile(index), d);
  });
  common::parallel_for(execution, tiling.num_tasks(), [&](std::int64_t index, int thread) {
    KeyStripTask<T, Arithmetic>(problem, grouping, tensors, tiling, execution.workspace, thread)
        .run(index / tiling.strips(), index % tiling.strips());
  });
  if (tensors.d_mask != nullptr) {
    common::parallel_for(execution, tiling.num_mask_tasks(), [&](std::int64_t index, int thread) {
      MaskGradient<T, Arithmetic>(problem, grouping, tensors, tiling, d,
                                  scratches + thread * BackwardScratch(problem, grouping, Arithmetic::kProducts).total)
          .run(tiling.mask_task(index));
    });
  }
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
