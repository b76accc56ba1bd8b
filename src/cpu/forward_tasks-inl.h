// SPDX-License-Identifier: Apache-2.0
// All tasks of a forward. This file is included once for each instruction set.
#if defined(DISTR_CPU_FORWARD_TASKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_FORWARD_TASKS_INL_H_
#undef DISTR_CPU_FORWARD_TASKS_INL_H_
#else
#define DISTR_CPU_FORWARD_TASKS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "common/parallel.h"
#include "common/sequence.h"
#include "cpu/forward_task-inl.h"
#include "cpu/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

template <class T, class Arithmetic>
void forward_of(const Problem& problem, const Grouping& grouping, const ForwardTiling& tiling,
                const ForwardTensors& tensors, const Execution& execution) {
  const std::int64_t splits = tiling.splits();
  auto* workspace = static_cast<float*>(execution.workspace);
  float* partials = workspace + useful_threads(execution.threads, tiling.num_tasks()) *
                                    ForwardScratch(problem, grouping, Arithmetic::kProducts).total;
  // Calls body(task, keys) for the tile's task, where it has rows.
  const auto with_task = [&](std::int64_t index, int thread, const auto& body) {
    QueryTile tile = tiling.tile(index);
    common::with_sequence(problem, tensors, tile.b,
                          [&](const Problem& own, const ForwardTensors& from, std::int64_t b) {
                            tile.b = b;
                            tile.rows = std::min(tile.rows, own.seq_q - tile.first);
                            if (tile.rows > 0) {
                              ForwardTask<T, Arithmetic> task(
                                  own, grouping, from, tile,
                                  workspace + thread * ForwardScratch(problem, grouping, Arithmetic::kProducts).total);
                              body(task, own.seq_k);
                            }
                          });
  };
  const auto partial = [&](std::int64_t index) { return partials + index * tiling.partial_floats(); };
  common::parallel_for(execution, tiling.num_tasks(), [&](std::int64_t index, int thread) {
    with_task(index / splits, thread, [&](ForwardTask<T, Arithmetic>& task, std::int64_t keys) {
      const std::int64_t first_key = index % splits * tiling.split_keys();
      task.run(first_key, std::min(first_key + tiling.split_keys(), keys));
      if (splits == 1) {
        task.write_output();
      } else {
        task.save_partial(partial(index));
      }
    });
  });
  if (splits == 1) {
    return;
  }
  common::parallel_for(execution, tiling.num_tiles(), [&](std::int64_t tile, int thread) {
    with_task(tile, thread, [&](ForwardTask<T, Arithmetic>& task, std::int64_t /*keys*/) {
      task.clear();
      for (std::int64_t split = 0; split < splits; ++split) {
        task.merge_partial(partial(tile * splits + split));
      }
      task.write_output();
    });
  });
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
