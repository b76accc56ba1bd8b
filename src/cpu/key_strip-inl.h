// SPDX-License-Identifier: Apache-2.0
// The backward of one strip of 128 keys: dK, dV, and the strip's share of dq_hat. This file is included once for each
// instruction set.
#if defined(DISTR_CPU_KEY_STRIP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_KEY_STRIP_INL_H_
#undef DISTR_CPU_KEY_STRIP_INL_H_
#else
#define DISTR_CPU_KEY_STRIP_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/gradient_strides.h"
#include "cpu/outliers-inl.h"
#include "cpu/score_gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// Writes dQ of one tile: spreads dq_hat over the columns of each group, gives dropped columns what their means have in
// it, and adds what near keys gave.
template <class T>
void write_dq(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors, const QueryTile& tile,
              const float* dq_hat) {
  const DqLayout layout(problem, grouping);
  const std::int64_t first_row = row_number(problem, tile, 0);
  const Strides strides = common::gradient_strides(problem).q;
  T* d_q = static_cast<T*>(tensors.d_q) + tile.b * strides.batch + tile.h * strides.head + tile.first * strides.row;
  for (const Segment& segment : find_segments(problem, grouping, tensors, tile)) {
    const common::Groups& groups = segment.groups;
    for (std::int64_t n = segment.first; n < segment.first + segment.rows; ++n) {
      const float* sums = dq_hat + (first_row + n) * layout.stride;
      std::array<float, kMaxHeadDim> row;
      std::fill_n(row.data(), problem.head_dim, 0.0F);
      for (std::int64_t g = 0; g < groups.count; ++g) {
        const std::int64_t members = grouping.estimator == Estimator::sample ? 1 : groups.size(g);
        const float share = sums[g] / static_cast<float>(members);
        for (std::int64_t member = 0; member < members; ++member) {
          row[static_cast<std::size_t>(groups.column(g, member))] = share;
        }
      }
      for (std::int64_t position = groups.count; segment.means != nullptr && position < groups.columns; ++position) {
        const auto c = static_cast<std::size_t>(groups.order[position]);
        row[c] = segment.means[c] * sums[groups.count];
      }
      for (std::int64_t c = 0; layout.has_near && c < problem.head_dim; ++c) {
        row[static_cast<std::size_t>(c)] += sums[layout.near + c];
      }
      store_row(row.data(), problem.head_dim, d_q + n * strides.row);
    }
  }
}

// A task computes dK and dV of 128 keys of a KV head, and their share of dq_hat. Products of floats share q_hat, dO, P
// and dS; pairs have a form of these for each axis that is summed over.
template <class T, class Arithmetic>
class KeyStripTask {
 public:
  using Word = typename Arithmetic::Word;

  KeyStripTask(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
               const BackwardTiling& tiling, void* workspace, int thread)
      : problem_(problem),
        grouping_(grouping),
        tensors_(tensors),
        tiling_(tiling),
        d_stride_(padded(problem.head_dim)),
        dv_stride_(padded(problem.head_dim_v)),
        layout_(problem, grouping),
        dq_hat_(static_cast<float*>(workspace)),
        turns_(reinterpret_cast<std::int32_t*>(dq_hat_ + tiling.turns_at())),
        offsets_(problem, grouping, Arithmetic::kProducts),
        scratch_(dq_hat_ + tiling.shared_floats() + thread * offsets_.total),
        gradient_(problem, grouping, tensors, dq_hat_ + tiling.d_at(), scratch_),
        summed_rows_(operand(offsets_.summed)) {
    dk_transposed_ = scratch_ + offsets_.dk_transposed;
    dk_hat_ = scratch_ + offsets_.dk_hat;
    dv_transposed_ = scratch_ + offsets_.dv_transposed;
    k_hat_by_key_ = operand(offsets_.k_hat_by_key);
    for (std::int64_t j = 0; j < words<Word>(kTileKeys); ++j) {
      k_hat_by_key_rows_[static_cast<std::size_t>(j)] = k_hat_by_key_ + j * d_stride_;
    }
  }

  void run(std::int64_t kv_head, std::int64_t strip) {
    [[maybe_unused]] const typename Arithmetic::Session session;
    const std::int64_t b = kv_head / problem_.heads_kv;
    const std::int64_t h_kv = kv_head % problem_.heads_kv;
    const std::int64_t first_key = strip * kTileKeys;
    const std::int64_t group = problem_.heads_q / problem_.heads_kv;
    std::fill_n(dk_transposed_, d_stride_ * kTileKeys, 0.0F);
    std::fill_n(dv_transposed_, dv_stride_ * kTileKeys, 0.0F);
    bool has_keys = false;  // of a strip that no tile sees they are not read
    holds_k_ = false;
    const std::int64_t first_tile = kv_head * group * tiling_.tiles_per_head();
    for (std::int64_t index = first_tile; index < first_tile + group * tiling_.tiles_per_head(); ++index) {
      const QueryTile tile = tiling_.tile(index);
      if (const Strips seen(problem_, tile); tile.rows > 0 && seen.has(strip)) {
        if (!has_keys) {
          gradient_.load_keys(b, h_kv, first_key);
          has_keys = true;
        }
        add_tile(tile, index, strip, seen);
      }
    }
    const auto [_, d_k, d_v] = common::gradient_strides(problem_);
    write(dk_transposed_, problem_.head_dim, static_cast<T*>(tensors_.d_k) + b * d_k.batch + h_kv * d_k.head, d_k.row,
          first_key);
    write(dv_transposed_, problem_.head_dim_v, static_cast<T*>(tensors_.d_v) + b * d_v.batch + h_kv * d_v.head, d_v.row,
          first_key);
  }

 private:
  [[nodiscard]] Word* operand(std::int64_t offset) const { return reinterpret_cast<Word*>(scratch_) + offset; }

  // The first strip that the tile sees initialises dq_hat, and the last one writes dQ.
  void add_tile(const QueryTile& tile, std::int64_t index, std::int64_t strip, const Strips& seen) {
    const bool is_first = strip == seen.first;
    gradient_.load_queries(tile);
    gradient_.run(GradientOf::products);
    add_dv();
    for (const Segment& segment : gradient_.segments) {
      add_dk(segment);
    }
    wait_for_turn(index, strip - seen.first);
    if (layout_.has_near && is_first) {
      std::fill_n(dq_hat_of(0), tile.rows * layout_.stride, 0.0F);
    }
    for (const Segment& segment : gradient_.segments) {
      add_dq(segment, layout_.has_near || !is_first);
    }
    end_turn(index, strip - seen.first);
    if (strip == seen.last) {
      write_dq<T>(problem_, grouping_, tensors_, tile, dq_hat_);
    }
  }

  // dV^T += dO^T P.
  void add_dv() {
    const std::int64_t rows = gradient_.tile.rows;
    const std::int64_t keys = gradient_.padded_keys;
    Word* d_o = gradient_.d_o;
    if constexpr (std::is_same_v<Word, Pair>) {
      d_o = operand(offsets_.summed_d_o);
      gradient_.load_d_o(d_o, dv_stride_);
    }
    take_outliers(d_o, rows, dv_stride_, dv_stride_, [&](const Outlier& outlier) {
      const float* p = gradient_.p + outlier.row * kTileKeys;
      add_outlier(outlier.value, {p, p, 1, gradient_.keys}, dv_transposed_ + outlier.column * kTileKeys, 1);
    });
    Arithmetic::multiply({d_o, 1, dv_stride_, summed_rows_.of(gradient_.p, rows, keys), dv_transposed_, kTileKeys,
                          problem_.head_dim_v, keys, words<Word>(rows), true});
  }

  // dk_hat^T = q_hat^T dS, which is added to the columns of each group; to dK^T itself where these are the groups.
  void add_dk(const Segment& segment) {
    const std::int64_t keys = gradient_.padded_keys;
    const common::Groups& groups = segment.groups;
    Word* q_hat = gradient_.q_hat + segment.first * d_stride_;
    if constexpr (std::is_same_v<Word, Pair>) {
      const Pair* rows = std::exchange(q_hat, operand(offsets_.summed_q_hat));
      for (std::int64_t n = 0; n < segment.rows; n += 2) {
        const Pair* second = n + 1 < segment.rows ? rows + (n + 1) * d_stride_ : nullptr;
        pair_rows(values(rows + n * d_stride_), values(second), groups.count, d_stride_, q_hat + n / 2 * d_stride_);
      }
    }
    const float* p = gradient_.p + segment.first * kTileKeys;
    const float* d_s = gradient_.d_s + segment.first * kTileKeys;
    take_outliers(q_hat, segment.rows, d_stride_, d_stride_, [&](const Outlier& outlier) {
      const std::int64_t row = outlier.row * kTileKeys;
      const std::int64_t members = outlier.column < groups.count ? groups.size(outlier.column) : 0;
      for (std::int64_t member = 0; member < members; ++member) {
        add_outlier(outlier.value, {p + row, d_s + row, 1, gradient_.keys},
                    dk_transposed_ + groups.column(outlier.column, member) * kTileKeys, 1);
      }
    });
    const bool are_columns = groups.order == nullptr;
    Arithmetic::multiply({q_hat, 1, d_stride_, summed_rows_.of(d_s, segment.rows, keys),
                          are_columns ? dk_transposed_ : dk_hat_, kTileKeys, groups.count, keys,
                          words<Word>(segment.rows), are_columns});
    for (std::int64_t g = 0; g < groups.count && !are_columns; ++g) {
      for (std::int64_t member = 0; member < groups.size(g); ++member) {
        float* row = dk_transposed_ + groups.column(g, member) * kTileKeys;
        const std::array<const float*, 2> both{row, dk_hat_ + g * kTileKeys};
        add_rows(both.data(), 2, keys, row);
      }
    }
  }

  // Of row n of the tile.
  [[nodiscard]] float* dq_hat_of(std::int64_t n) const {
    return dq_hat_ + row_number(problem_, gradient_.tile, n) * layout_.stride;
  }

  // dq_hat += dS k_hat.
  void add_dq(const Segment& segment, bool accumulate) {
    float* dq_hat = dq_hat_of(segment.first) + (gradient_.is_near(segment) ? layout_.near : 0);
    const float* p = gradient_.p + segment.first * kTileKeys;
    const float* d_s = gradient_.d_s + segment.first * kTileKeys;
    const std::int64_t keys = gradient_.keys;
    const std::int64_t columns = round_up(segment.template columns<float>(), vector_length());
    if (!holds_k_ || segment.groups.order != nullptr) {
      load_k_hat_by_key(segment);
      take_outliers(k_hat_by_key_, keys, columns, d_stride_, [&](const Outlier& outlier) {
        for (std::int64_t n = 0; !accumulate && n < segment.rows; ++n) {
          std::fill_n(dq_hat + n * layout_.stride, columns, 0.0F);
        }
        accumulate = true;
        holds_k_ = false;  // but for this
        add_outlier(outlier.value, {p + outlier.row, d_s + outlier.row, kTileKeys, segment.rows},
                    dq_hat + outlier.column, layout_.stride);
      });
    }
    Arithmetic::multiply({by_keys(d_s, segment.rows), kTileKeys, 1, k_hat_by_key_rows_.data(), dq_hat, layout_.stride,
                          segment.rows, columns, words<Word>(keys), accumulate});
  }

  // dS [rows, 128] as a product takes it that sums over the keys.
  const Word* by_keys(const float* d_s, std::int64_t rows) {
    if constexpr (std::is_same_v<Word, float>) {
      return d_s;
    } else {
      Word* pairs = operand(offsets_.d_s_pairs);
      for (std::int64_t n = 0; n < rows; ++n) {
        round_row(d_s + n * kTileKeys, gradient_.padded_keys, pairs + n * kTileKeys);
      }
      return pairs;
    }
  }

  // Loads k_hat [keys, r]: K itself with all columns, which is kept for the next tile, or what is fused.
  void load_k_hat_by_key(const Segment& segment) {
    const bool is_k = segment.groups.order == nullptr;
    if (is_k) {
      gradient_.load_k(k_hat_by_key_, d_stride_);
    } else if constexpr (std::is_same_v<Word, float>) {
      gradient_.fuse_by_key(segment, k_hat_by_key_, d_stride_);
    } else {
      float* sums = scratch_ + offsets_.k_hat_sums;
      gradient_.fuse_by_key(segment, sums, d_stride_);
      const std::int64_t columns = round_up(segment.template columns<float>(), vector_length());
      for (std::int64_t j = 0; j < gradient_.keys; j += 2) {
        const float* second = j + 1 < gradient_.keys ? sums + (j + 1) * d_stride_ : nullptr;
        round_rows(sums + j * d_stride_, second, columns, k_hat_by_key_ + j / 2 * d_stride_);
      }
    }
    holds_k_ = is_k;
  }

  void wait_for_turn(std::int64_t tile, std::int64_t mine) {
    const std::atomic_ref<std::int32_t> turn(turns_[tile]);
    for (std::int32_t now = turn.load(std::memory_order_acquire); now != mine;
         now = turn.load(std::memory_order_acquire)) {
      turn.wait(now, std::memory_order_acquire);
    }
  }

  void end_turn(std::int64_t tile, std::int64_t mine) {
    const std::atomic_ref<std::int32_t> turn(turns_[tile]);
    turn.store(static_cast<std::int32_t>(mine + 1), std::memory_order_release);
    turn.notify_all();
  }

  // Writes the columns [0, columns) of the strip's keys from a transposed tile.
  void write(const float* transposed, std::int64_t columns, T* target, std::int64_t row_stride,
             std::int64_t first_key) {
    for (std::int64_t j = 0; j < std::min(kTileKeys, problem_.seq_k - first_key); ++j) {
      T* row = target + (first_key + j) * row_stride;
      for (std::int64_t c = 0; c < columns; ++c) {
        row[c] = common::from_float<T>(transposed[c * kTileKeys + j]);
      }
    }
  }

  const Problem& problem_;
  const Grouping& grouping_;
  const BackwardTensors& tensors_;
  const BackwardTiling& tiling_;
  std::int64_t d_stride_, dv_stride_;
  DqLayout layout_;
  float* dq_hat_;        // [batch, heads_q, seq_q] rows of that layout, shared
  std::int32_t* turns_;  // [tiles], shared
  BackwardScratch offsets_;
  float* scratch_;
  ScoreGradient<T, Arithmetic> gradient_;
  SummedRows<Word> summed_rows_;
  float* dk_transposed_;  // [d, 128]
  float* dk_hat_;         // [d, 128], where groups are not the columns
  float* dv_transposed_;  // [dv, 128]
  Word* k_hat_by_key_;    // [128, d]
  bool holds_k_ = false;  // whether k_hat_by_key_ holds K itself
  std::array<const Word*, kTileKeys> k_hat_by_key_rows_{};
};

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
