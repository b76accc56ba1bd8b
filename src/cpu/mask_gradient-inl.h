// SPDX-License-Identifier: Apache-2.0
// The gradient of an additive mask. This file is included once for each instruction set.
#if defined(DISTR_CPU_MASK_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_MASK_GRADIENT_INL_H_
#undef DISTR_CPU_MASK_GRADIENT_INL_H_
#else
#define DISTR_CPU_MASK_GRADIENT_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/backward_tiling.h"
#include "cpu/score_gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// The gradient of an additive mask: dS summed over the axes that the mask repeats along. A task owns the mask's
// elements of a tile of queries and a strip of keys, and computes all their dS anew, so that no two tasks share a sum.
template <class T, class Arithmetic>
class MaskGradient {
 public:
  MaskGradient(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
               const BackwardTiling& tiling, const float* d, float* scratch)
      : problem_(problem),
        tiling_(tiling),
        d_mask_(static_cast<float*>(tensors.d_mask)),
        gradient_(problem, grouping, tensors, d, scratch),
        sum_(scratch + BackwardScratch(problem, grouping, Arithmetic::kProducts).d_mask) {}

  void run(const MaskTask& task) {
    [[maybe_unused]] const typename Arithmetic::Session session;
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
  ScoreGradient<T, Arithmetic> gradient_;
  float* sum_;  // [128, 128]
};

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
