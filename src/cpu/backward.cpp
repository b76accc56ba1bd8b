// SPDX-License-Identifier: Apache-2.0
// Backward on the CPU (method, 3; the order is a constant). A task owns 128 keys of a KV head and meets the tiles of
// queries one by one, so that dK and dV stay in its cache and nothing of size N x N exists.
//
//   for each tile of queries of the KV head's query heads, that see some of the keys:
//     P   = exp(cap(q_hat k_hat^T scale) + mask - LSE)     D = rowsum(dO * O) - dLSE
//     dS  = P * (dO V^T - D), times the slope of the cap where scores are capped
//     dV^T += dO^T P        dk_hat^T = scale q_hat^T dS, spread over the columns of dK^T
//     dq_hat += scale dS k_hat                              by all tasks of the head, in the order of their keys
//   dQ = dq_hat spread over its columns                     by the last task that adds to it
//
// A tile's counter says how many tasks have added to its dq_hat; a task waits for its turn. Tasks are taken in the
// order of their keys, so the one that is waited for is always under way: no deadlock, and the same bits for any number
// of threads. Packed sequences are taken one after the other.
#include <algorithm>
#include <array>

#include "common/block.h"
#include "common/parallel.h"
#include "common/sequence.h"
#include "cpu/backward_tiling.h"
#include "cpu/entries.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include <hwy/foreach_target.h>
// After foreach_target:
#include <hwy/highway.h>

#include "cpu/key_strip-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// The gradient of an additive mask: dS summed over the axes that the mask repeats along. A task owns the mask's
// elements of a tile of queries and a strip of keys, and computes all their dS anew, so that no two tasks share a sum.
template <class T, class Word>
class MaskGradient {
 public:
  MaskGradient(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
               const BackwardTiling& tiling, float* scratch)
      : problem_(problem),
        tiling_(tiling),
        d_mask_(static_cast<float*>(tensors.d_mask)),
        gradient_(problem, grouping, tensors, scratch),
        sum_(scratch + BackwardScratch(problem, grouping, kProducts<Word>).d_mask) {}

  void run(const MaskTask& task) {
    std::fill_n(sum_, kTileQueries * kTileKeys, 0.0F);
    for (std::int64_t b = task.batches.first; b < task.batches.end; ++b) {
      for (std::int64_t h = task.heads.first; h < task.heads.end; ++h) {
        for (std::int64_t strip = task.strips.first; strip < task.strips.end; ++strip) {
          gradient_.load_keys(b, h / (problem_.heads_q / problem_.heads_kv), strip * kTileKeys);
          for (std::int64_t n = task.tiles.first; n < task.tiles.end; ++n) {
            const QueryTile tile = tiling_.tile((b * problem_.heads_q + h) * tiling_.tiles_per_head() + n);
            if (tile.rows > 0 && Strips(problem_, tile).has(strip)) {
              add(tile, task);
            }
          }
        }
      }
    }
    write(task);
  }

 private:
  void add(const QueryTile& tile, const MaskTask& task) {
    gradient_.load_queries(tile);
    gradient_.run(GradientOf::scores);
    for (std::int64_t n = 0; n < tile.rows; ++n) {
      for (std::int64_t j = 0; j < gradient_.keys; ++j) {
        sum_[(task.tiles.whole ? 0 : n) * kTileKeys + (task.strips.whole ? 0 : j)] += gradient_.d_s[n * kTileKeys + j];
      }
    }
  }

  void write(const MaskTask& task) const {
    const QueryTile tile = tiling_.tile_of_head(task.tiles.first);
    const std::int64_t rows = task.tiles.whole ? 1 : tile.rows;
    const std::int64_t first_key = task.strips.first * kTileKeys;
    const std::int64_t keys = task.strips.whole ? 1 : std::min(kTileKeys, problem_.seq_k - first_key);
    const std::array<std::int64_t, 4> strides = contiguous_mask_strides(problem_.mask);
    float* start = d_mask_ + task.batches.first * strides[0] + task.heads.first * strides[1];
    for (std::int64_t n = 0; n < rows; ++n) {
      for (std::int64_t j = 0; j < keys; ++j) {
        start[(task.tiles.whole ? 0 : tile.first + n) * strides[2] +
              (task.strips.whole ? 0 : first_key + j) * strides[3]] = sum_[n * kTileKeys + j];
      }
    }
  }

  const Problem& problem_;
  const BackwardTiling& tiling_;
  float* d_mask_;
  ScoreGradient<T, Word> gradient_;
  float* sum_;  // [128, 128]
};

template <class T, class Word>
void backward_of(const Problem& problem, const Grouping& grouping, const BackwardTiling& tiling,
                 const BackwardTensors& tensors, const Execution& execution) {
  auto* dq_hat = static_cast<float*>(execution.workspace);
  float* scratches = dq_hat + tiling.shared_floats();
  std::fill_n(reinterpret_cast<std::int32_t*>(dq_hat + tiling.dq_hat_floats()), tiling.num_tiles(), 0);
  common::parallel_for(execution, tiling.num_tasks(), [&](std::int64_t index, int thread) {
    KeyStripTask<T, Word>(problem, grouping, tensors, tiling, execution.workspace, thread)
        .run(index / tiling.strips(), index % tiling.strips());
  });
  if (tensors.d_mask != nullptr) {
    common::parallel_for(execution, tiling.num_mask_tasks(), [&](std::int64_t index, int thread) {
      MaskGradient<T, Word>(problem, grouping, tensors, tiling,
                            scratches + thread * BackwardScratch(problem, grouping, kProducts<Word>).total)
          .run(tiling.mask_task(index));
    });
  }
}

void backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
              const Execution& execution, Products products) {
  with_operands(problem.dtype, products, [&]<class T, class Word>(std::type_identity<T>, std::type_identity<Word>) {
    for (std::int64_t b = 0; b < (common::has_lengths(problem) ? problem.batch : 1); ++b) {
      common::with_sequence(problem, tensors, b,
                            [&](const Problem& own, const BackwardTensors& from, std::int64_t /*b*/) {
                              backward_of<T, Word>(own, grouping, BackwardTiling(own, grouping), from, execution);
                            });
    }
  });
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace distr::cpu {

HWY_EXPORT(backward);

template <Products kProducts>
KernelPlan<BackwardTensors> plan_backward(const Problem& problem, const Grouping& grouping,
                                          const Execution& execution) {
  const Problem longest = common::longest_sequence(problem);
  const BackwardTiling tiling(longest, grouping);
  const std::int64_t tasks = std::max(tiling.num_tasks(), tiling.num_mask_tasks());
  const std::int64_t threads = useful_threads(execution.threads, tasks);
  KernelPlan<BackwardTensors> plan = plan_of<BackwardTensors>(problem, grouping, tiling.num_tasks(), threads);
  plan.workspace.add("dQ's sums and turns", bytes_of(tiling.shared_floats()));
  plan.workspace.add("tiles of each thread", bytes_of(threads * BackwardScratch(problem, grouping, kProducts).total));
  plan.run = [&problem, &grouping](const BackwardTensors& tensors, const Execution& with) {
    HWY_DYNAMIC_DISPATCH(backward)(problem, grouping, tensors, with, kProducts);
  };
  return plan;
}

template KernelPlan<BackwardTensors> plan_backward<Products::of_floats>(const Problem&, const Grouping&,
                                                                        const Execution&);
template KernelPlan<BackwardTensors> plan_backward<Products::of_pairs>(const Problem&, const Grouping&,
                                                                       const Execution&);

}  // namespace distr::cpu
#endif
