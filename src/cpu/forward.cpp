// SPDX-License-Identifier: Apache-2.0
// Forward on the CPU: O = softmax(scale * q_hat k_hat^T + mask) V, one tile of queries a task, one tile of keys at a
// time, so that nothing of size N x N exists.
//
//   for each tile of up to 128 queries (whole blocks, or a part of one):
//     q_hat = estimate(Q)                                           once; by the groups of each block
//     for each tile of 128 keys that some of its queries see:
//       K^T, V to floats in the cache
//       for each block in the tile:  k_hat^T = sums of rows of K^T  or just pointers to the kept rows
//         for each 24 of its rows:   S = q_hat k_hat^T;  P = online softmax of S, row by row;  O += P V
//     O /= row sums
//     where O is not finite:  again, with V so small that no sum overflows
//
// Few tiles and many keys: several tasks share the keys of a tile, and their partial results are merged in order.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "common/block.h"
#include "common/mask.h"
#include "common/parallel.h"
#include "cpu/entries.h"
#include "cpu/tiling.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include <hwy/foreach_target.h>
// After foreach_target:
#include <hwy/highway.h>

#include "cpu/segment-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// One task: a tile of queries against a range of keys.
template <class T>
class ForwardTask {
 public:
  ForwardTask(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const QueryTile& tile,
              float* scratch)
      : problem_(problem),
        grouping_(grouping),
        tensors_(tensors),
        mask_(problem.mask, tensors.mask),
        tile_(tile),
        h_kv_(tile.h / (problem.heads_q / problem.heads_kv)),
        d_stride_(padded(problem.head_dim)),
        dv_stride_(padded(problem.head_dim_v)),
        unit_(problem, mask_) {
    const ForwardScratch offsets(problem, grouping);
    q_hat_ = scratch + offsets.q_hat;
    k_transposed_ = scratch + offsets.k_transposed;
    k_hat_ = scratch + offsets.k_hat;
    v_ = scratch + offsets.v;
    scores_ = scratch + offsets.scores;
    o_ = scratch + offsets.o;
    for (std::int64_t j = 0; j < kTileKeys; ++j) {
      v_rows_[static_cast<std::size_t>(j)] = v_ + j * dv_stride_;
    }
  }

  // Leaves O, not yet divided by the row sums, and the rows' states.
  void run(std::int64_t first_key, std::int64_t end_key) {
    const T* q = static_cast<const T*>(tensors_.q) + tile_.b * problem_.q.batch + tile_.h * problem_.q.head +
                 tile_.first * problem_.q.row;
    segments_ = find_segments(problem_, grouping_, tensors_.order, tile_);
    for (const Segment& segment : segments_) {
      estimate_q(problem_, grouping_.estimator, segment, q, q_hat_, d_stride_);
    }
    std::fill_n(o_, tile_.rows * dv_stride_, 0.0F);
    const std::int64_t visible = common::visible_keys(problem_, tile_.first + tile_.rows - 1);
    for (std::int64_t j = first_key; j < std::min(end_key, visible); j += kTileKeys) {
      attend_keys(j, std::min({kTileKeys, end_key - j, visible - j}));
    }
  }

  void write_output() {
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      const RowState& state = states_[static_cast<std::size_t>(n)];
      const std::int64_t i = tile_.first + n;
      scale_row(o_row(n), dv_stride_, state.sum == 0 ? 0.0F : 1.0F / state.sum);
      store_row(o_row(n), problem_.head_dim_v, output_row(n));
      if (tensors_.lse != nullptr) {
        static_cast<float*>(tensors_.lse)[(tile_.b * problem_.heads_q + tile_.h) * problem_.seq_q + i] =
            state.sum == 0 ? kHidden : scaled(state.maximum, unit_.to_natural) + std::log(state.sum);
      }
    }
    if (!all_finite(o_, tile_.rows * dv_stride_)) {
      replace_overflows();
    }
  }

  // A split's result, to be merged by merge_partial().
  void save_partial(float* partial) const {
    std::copy_n(o_, tile_.rows * dv_stride_, partial);
    float* states = partial + kTileQueries * dv_stride_;
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      states[2 * n] = states_[static_cast<std::size_t>(n)].maximum;
      states[2 * n + 1] = states_[static_cast<std::size_t>(n)].sum;
    }
  }

  // Adds what save_partial() left to this task, which starts from clear().
  void merge_partial(const float* partial) {
    const float* states = partial + kTileQueries * dv_stride_;
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      RowState& state = states_[static_cast<std::size_t>(n)];
      const RowState other{states[2 * n], states[2 * n + 1]};
      if (other.sum == 0) {
        continue;  // saw no key
      }
      const float maximum = std::max(state.maximum, other.maximum);
      const float keep = state.maximum == maximum ? 1.0F : power_of_2((state.maximum - maximum) * unit_.to_log2);
      const float take = other.maximum == maximum ? 1.0F : power_of_2((other.maximum - maximum) * unit_.to_log2);
      state = {maximum, state.sum * keep + other.sum * take};
      scale_or_clear_row(o_row(n), dv_stride_, keep);
      for (std::int64_t c = 0; c < dv_stride_ && take != 0; ++c) {
        o_row(n)[c] += partial[n * dv_stride_ + c] * take;
      }
    }
  }

  void clear() { std::fill_n(o_, tile_.rows * dv_stride_, 0.0F); }

 private:
  [[nodiscard]] float* o_row(std::int64_t n) const { return o_ + n * dv_stride_; }
  [[nodiscard]] T* output_row(std::int64_t n) const {
    return static_cast<T*>(tensors_.o) + tile_.b * problem_.o.batch + tile_.h * problem_.o.head +
           (tile_.first + n) * problem_.o.row;
  }

  // The row sums divide O at the end, and up to seq_k values of V add up before: a sum may overflow where O, a mean of
  // values, is finite. Attends once more with smaller values, and replaces what is not finite. NaN and infinities of V
  // come again.
  void replace_overflows() {
    // P is 2^kRescaleThreshold at most.
    const int exponent = std::ilogb(static_cast<double>(problem_.seq_k)) + 2 + static_cast<int>(kRescaleThreshold);
    value_scale_ = std::ldexp(1.0F, -exponent);
    states_ = {};
    run(0, problem_.seq_k);
    std::array<float, kMaxHeadDim> before;
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      float* after = o_row(n);
      load_row(output_row(n), problem_.head_dim_v, before.data());
      for (std::int64_t c = 0; c < problem_.head_dim_v; ++c) {
        const float kept = before[static_cast<std::size_t>(c)];
        after[c] = std::isfinite(kept) ? kept : enlarged(after[c] / states_[static_cast<std::size_t>(n)].sum, exponent);
      }
      store_row(after, problem_.head_dim_v, output_row(n));
    }
  }

  // A finite value stays finite: a mean exceeds the largest value by its rounding at most.
  static float enlarged(float value, int exponent) {
    constexpr float kLargest = std::numeric_limits<float>::max();
    return std::isfinite(value) ? std::clamp(std::ldexp(value, exponent), -kLargest, kLargest) : value;
  }

  void attend_keys(std::int64_t first_key, std::int64_t keys) {
    const std::int64_t padded_keys = round_up(keys, std::max<std::int64_t>(vector_length(), 4));
    const T* k = static_cast<const T*>(tensors_.k) + tile_.b * problem_.k.batch + h_kv_ * problem_.k.head;
    const T* v = static_cast<const T*>(tensors_.v) + tile_.b * problem_.v.batch + h_kv_ * problem_.v.head;
    load_transposed(k + first_key * problem_.k.row, problem_.k.row, keys, problem_.head_dim, padded_keys, k_transposed_,
                    kTileKeys);
    load_rows(v + first_key * problem_.v.row, problem_.v.row, keys, problem_.head_dim_v, dv_stride_, v_, dv_stride_);
    if (value_scale_ != 1) {
      scale_row(v_, keys * dv_stride_, value_scale_);
    }
    const bool finite = all_finite(v_, keys * dv_stride_);
    for (const Segment& segment : segments_) {
      KHatRows k_hat_rows;
      fuse_k(segment.groups, k_transposed_, padded_keys, k_hat_, k_hat_rows);
      for (std::int64_t n = 0; n < segment.rows; n += kRowsPerStep) {
        const std::int64_t first = segment.first + n;
        const std::int64_t rows = std::min(kRowsPerStep, segment.rows - n);
        multiply({q_hat_ + first * d_stride_, d_stride_, 1, k_hat_rows.data(), scores_, kTileKeys, rows, padded_keys,
                  segment.groups.count, false});
        for (std::int64_t row = 0; row < rows; ++row) {
          take_softmax(first + row, scores_ + row * kTileKeys, first_key, keys, padded_keys);
        }
        if (finite) {
          multiply({scores_, kTileKeys, 1, v_rows_.data(), o_row(first), dv_stride_, rows,
                    round_up(problem_.head_dim_v, vector_length()), keys, true});
        } else {
          add_weighty_values(first, rows, keys);
        }
      }
    }
  }

  // Scores of row n to probabilities, up to the row's sum.
  void take_softmax(std::int64_t n, float* scores, std::int64_t first_key, std::int64_t keys,
                    std::int64_t padded_keys) {
    // Rows that see all keys of a full tile are scaled on the way through the softmax.
    const bool finished =
        unit_.is_raw && keys == padded_keys && common::visible_keys(problem_, tile_.first + n) >= first_key + keys;
    if (!finished) {
      finish_scores(problem_, mask_, unit_, tile_, n, first_key, keys, padded_keys, scores);
    }
    online_softmax(scores, padded_keys, unit_.to_log2, states_[static_cast<std::size_t>(n)], o_row(n), dv_stride_);
  }

  // O += P V without the keys of probability 0, hidden ones above all: 0 times NaN or infinity would be NaN. Adds in
  // the order of multiply(): what a row does not see must not change its bits.
  void add_weighty_values(std::int64_t first, std::int64_t rows, std::int64_t keys) {
    for (std::int64_t row = 0; row < rows; ++row) {
      std::array<float, kMaxHeadDim> sum{};
      for (std::int64_t j = 0; j < keys; ++j) {
        const float p = scores_[row * kTileKeys + j];
        for (std::int64_t c = 0; p != 0 && c < problem_.head_dim_v; ++c) {
          sum[static_cast<std::size_t>(c)] = std::fma(p, v_[j * dv_stride_ + c], sum[static_cast<std::size_t>(c)]);
        }
      }
      for (std::int64_t c = 0; c < problem_.head_dim_v; ++c) {
        o_row(first + row)[c] += sum[static_cast<std::size_t>(c)];
      }
    }
  }

  const Problem& problem_;
  const Grouping& grouping_;
  const ForwardTensors& tensors_;
  common::MaskView mask_;
  QueryTile tile_;
  std::int64_t h_kv_;
  std::int64_t d_stride_, dv_stride_;
  ScoreUnit unit_;
  float* q_hat_;           // [128, d]
  float* k_transposed_;    // [d, 128]
  float* k_hat_;           // [r, 128]
  float* v_;               // [128, dv]
  float* scores_;          // [24, 128]
  float* o_;               // [128, dv]
  float value_scale_ = 1;  // a power of 2
  std::array<RowState, kTileQueries> states_{};
  Segments segments_;
  std::array<const float*, kTileKeys> v_rows_{};
};

template <class T>
void forward_of(const Problem& problem, const Grouping& grouping, const ForwardTiling& tiling,
                const ForwardTensors& tensors, const Execution& execution) {
  const std::int64_t splits = tiling.splits();
  auto* workspace = static_cast<float*>(execution.workspace);
  float* partials =
      workspace + useful_threads(execution.threads, tiling.num_tasks()) * ForwardScratch(problem, grouping).total;
  const auto task = [&](std::int64_t tile, int thread) {
    return ForwardTask<T>(problem, grouping, tensors, tiling.tile(tile),
                          workspace + thread * ForwardScratch(problem, grouping).total);
  };
  const auto partial = [&](std::int64_t index) { return partials + index * partial_floats(problem); };
  common::parallel_for(execution, tiling.num_tasks(), [&](std::int64_t index, int thread) {
    if (tiling.tile(index / splits).rows == 0) {
      return;
    }
    ForwardTask<T> work = task(index / splits, thread);
    const std::int64_t first_key = index % splits * tiling.split_keys();
    work.run(first_key, std::min(first_key + tiling.split_keys(), problem.seq_k));
    if (splits == 1) {
      work.write_output();
    } else {
      work.save_partial(partial(index));
    }
  });
  if (splits == 1) {
    return;
  }
  common::parallel_for(execution, tiling.num_tiles(), [&](std::int64_t tile, int thread) {
    ForwardTask<T> work = task(tile, thread);
    work.clear();
    for (std::int64_t split = 0; split < splits; ++split) {
      work.merge_partial(partial(tile * splits + split));
    }
    work.write_output();
  });
}

void forward(const Problem& problem, const Grouping& grouping, const ForwardTiling& tiling,
             const ForwardTensors& tensors, const Execution& execution) {
  common::with_element(problem.dtype, [&]<class T>(std::type_identity<T>) {
    if constexpr (!std::is_same_v<T, double>) {
      forward_of<T>(problem, grouping, tiling, tensors, execution);
    }
  });
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace distr::cpu {

HWY_EXPORT(forward);

KernelPlan<ForwardTensors> plan_forward(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  const ForwardTiling tiling(problem, grouping);
  const std::int64_t threads = useful_threads(execution.threads, tiling.num_tasks());
  KernelPlan<ForwardTensors> plan = plan_of<ForwardTensors>(problem, grouping, tiling.num_tasks(), threads);
  plan.workspace.add("tiles of each thread", bytes_of(threads * ForwardScratch(problem, grouping).total));
  plan.workspace.add("partial sums", tiling.splits() == 1 ? 0 : bytes_of(tiling.num_tasks() * partial_floats(problem)));
  plan.run = [&problem, &grouping, tiling](const ForwardTensors& tensors, const Execution& with) {
    HWY_DYNAMIC_DISPATCH(forward)(problem, grouping, tiling, tensors, with);
  };
  return plan;
}

}  // namespace distr::cpu
#endif
