// SPDX-License-Identifier: Apache-2.0
// The forward of one tile of queries. This file is included once for each instruction set.
#if defined(DISTR_CPU_FORWARD_TASK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_FORWARD_TASK_INL_H_
#undef DISTR_CPU_FORWARD_TASK_INL_H_
#else
#define DISTR_CPU_FORWARD_TASK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/arithmetic-inl.h"
#include "cpu/outliers-inl.h"
#include "cpu/pair_segment-inl.h"
#include "cpu/segment-inl.h"
#include "cpu/vote-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// One task: a tile of queries against a range of keys.
template <class T, class Arithmetic>
class ForwardTask {
 public:
  using Word = typename Arithmetic::Word;

  ForwardTask(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const QueryTile& tile,
              float* scratch)
      : problem_(problem),
        grouping_(grouping),
        tensors_(tensors),
        mask_(problem.mask, tensors.mask),
        tile_(tile),
        h_kv_(tile.h / (problem.heads_q / problem.heads_kv)),
        d_stride_(query_stride(problem, Arithmetic::kProducts)),
        dv_stride_(padded(problem.head_dim_v)),
        unit_(problem, mask_),
        offsets_(problem, grouping, Arithmetic::kProducts),
        states_(scratch + offsets_.sums) {
    auto* operands = reinterpret_cast<Word*>(scratch);
    q_hat_ = operands + offsets_.q_hat;
    q_ = common::has_near_keys(grouping) && !is_exact(grouping) ? operands + offsets_.q : q_hat_;
    k_transposed_ = operands + offsets_.k_transposed;
    k_hat_ = operands + offsets_.k_hat;
    v_ = operands + offsets_.v;
    p_ = operands + offsets_.p;
    scores_ = scratch + offsets_.scores;
    o_ = scratch + offsets_.o;
    for (std::int64_t j = 0; j < words<Word>(kTileKeys); ++j) {
      v_rows_[static_cast<std::size_t>(j)] = v_ + j * dv_stride_;
    }
  }

  // Leaves O, not yet divided by the row sums, and the rows' states. Near keys come first, for they decide which far
  // keys are skipped.
  void run(std::int64_t first_key, std::int64_t end_key) {
    [[maybe_unused]] const typename Arithmetic::Session session;
    load_queries();
    clear();
    const common::KeySpan visible = common::visible_keys(problem_, tile_.first, tile_.rows);
    const std::int64_t end = std::min(end_key, visible.end);
    first_key = std::max(first_key, visible.first / kTileKeys * kTileKeys);
    if (common::has_near_keys(grouping_)) {
      for (std::int64_t j = first_key; j < end; j += kTileKeys) {
        attend_keys(j, std::min(kTileKeys, end - j), Reach::near);
      }
    }
    if (grouping_.skip > 0) {
      start_votes();
    }
    for (std::int64_t j = first_key; j < end; j += kTileKeys) {
      attend_keys(j, std::min(kTileKeys, end - j), Reach::far);
    }
  }

  void write_output() {
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      const RowState state = states_.of(n);
      const std::int64_t i = tile_.first + n;
      scale_row(o_row(n), dv_stride_, state.sum == 0 ? 0.0F : 1.0F / state.sum);
      store_row(o_row(n), problem_.head_dim_v, output_row(n));
      if (tensors_.lse != nullptr) {
        static_cast<float*>(tensors_.lse)[common::row_index(problem_, tile_.b, tile_.h, i)] =
            state.sum == 0 ? kHidden : scaled(state.maximum, unit_.to_natural) + std::log(state.sum);
      }
    }
    if (tensors_.halves != nullptr) {
      votes_.write(problem_, tile_, tensors_.halves);
    }
    if (!all_finite(o_, tile_.rows * dv_stride_)) {
      replace_overflows();
    }
  }

  // A split's result, to be merged by merge_partial().
  void save_partial(float* partial) const {
    std::copy_n(o_, tile_.rows * dv_stride_, partial);
    auto* states = reinterpret_cast<RowState*>(partial + tile_.rows * dv_stride_);
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      states[n] = states_.of(n);
    }
  }

  // Adds what save_partial() left to this task, which starts from clear().
  void merge_partial(const float* partial) {
    const auto* states = reinterpret_cast<const RowState*>(partial + tile_.rows * dv_stride_);
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      if (states[n].sum == 0) {
        continue;  // saw no key
      }
      const auto [keep, take] = states_.merge(n, states[n], unit_.to_log2);
      scale_or_clear_row(o_row(n), dv_stride_, keep);
      for (std::int64_t c = 0; c < dv_stride_ && take != 0; ++c) {
        o_row(n)[c] += partial[n * dv_stride_ + c] * take;
      }
    }
  }

  void clear() {
    std::fill_n(o_, tile_.rows * dv_stride_, 0.0F);
    states_.clear(tile_.rows);
  }

 private:
  static constexpr std::int64_t kRows = rows_per_step(Arithmetic::kProducts);  // that go through a step together

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
    run(0, problem_.seq_k);
    std::array<float, kMaxHeadDim> before;
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      float* after = o_row(n);
      const float sum = states_.of(n).sum;
      load_row(output_row(n), problem_.head_dim_v, before.data());
      for (std::int64_t c = 0; c < problem_.head_dim_v; ++c) {
        const float kept = before[static_cast<std::size_t>(c)];
        after[c] = std::isfinite(kept) ? kept : enlarged(after[c] / sum, exponent);
      }
      store_row(after, problem_.head_dim_v, output_row(n));
    }
  }

  // A finite value stays finite: a mean exceeds the largest value by its rounding at most.
  static float enlarged(float value, int exponent) {
    constexpr float kLargest = std::numeric_limits<float>::max();
    return std::isfinite(value) ? std::clamp(std::ldexp(value, exponent), -kLargest, kLargest) : value;
  }

  void load_queries() {
    const T* q = static_cast<const T*>(tensors_.q) + tile_.b * problem_.q.batch + tile_.h * problem_.q.head +
                 tile_.first * problem_.q.row;
    segments_ = find_segments(problem_, grouping_, tensors_, tile_);
    for (const Segment& segment : segments_) {
      estimate_q(problem_, grouping_.estimator, segment, q, q_hat_, d_stride_);
      if (q_ != q_hat_) {
        estimate_q(problem_, grouping_.estimator, segment.exact(), q, q_, d_stride_);
      }
      if (grouping_.finish && segment.means != nullptr) {
        append_dropped_columns(segment);
      }
    }
  }

  // Puts the dropped columns of Q behind the kept ones, to finish scores with. What the means add to a score moves the
  // bound of the vote instead.
  void append_dropped_columns(const Segment& segment) {
    const common::Groups& groups = segment.groups;
    const std::int32_t* dropped = groups.order + groups.count;
    for (std::int64_t n = segment.first; n < segment.first + segment.rows; ++n) {
      Word* q_hat = q_hat_ + n * d_stride_;
      const float of_means = score_of_means(q_hat, groups);
      votes_.dropped[static_cast<std::size_t>(n)] = unit_.is_raw ? of_means : scaled(of_means, unit_.scale);
      put_columns(q_ + n * d_stride_, dropped, groups.columns - groups.count, q_hat + words<Word>(groups.count));
    }
  }

  // The near scores are in; nothing is counted yet.
  void start_votes() {
    votes_.counts = {};
    for (std::int64_t n = 0; n < tile_.rows; ++n) {
      votes_.find_bound(n, states_.of(n), unit_.is_raw ? problem_.softmax_scale() : 1, grouping_.skip);
    }
  }

  enum class Reach : std::uint8_t { near, far };

  [[nodiscard]] bool reaches(const Segment& segment, Reach reach) const {
    return segment.near.has_key(first_key_) == (reach == Reach::near);
  }

  // The rows that the keys are near to, or far from.
  void attend_keys(std::int64_t first_key, std::int64_t keys, Reach reach) {
    first_key_ = first_key;
    if (std::none_of(segments_.begin(), segments_.end(), [&](const Segment& s) { return reaches(s, reach); })) {
      return;
    }
    load_keys(keys);
    if (reach == Reach::far && grouping_.skip > 0) {
      attend_kept_keys();
      return;
    }
    load_values();
    const KeyRange all{0, keys_, padded_keys_};
    for (const Segment& segment : segments_) {
      if (!reaches(segment, reach)) {
        continue;
      }
      const Segment exact = segment.exact();
      const Segment& scored = reach == Reach::near ? exact : segment;
      const Word* q_hat = reach == Reach::near ? q_ : q_hat_;
      KHatRows<Word> k_hat_rows;
      fuse_k(scored, k_transposed_, padded_keys_, k_hat_, k_hat_rows);
      for (std::int64_t n = 0; n < segment.rows; n += kRows) {
        const std::int64_t first = segment.first + n;
        const std::int64_t rows = std::min(kRows, segment.rows - n);
        if (!see_any(problem_, tile_.first + first, rows, first_key_, keys_)) {
          continue;
        }
        Arithmetic::multiply({q_hat + first * d_stride_, d_stride_, 1, k_hat_rows.data(), scores_, kTileKeys, rows,
                              padded_keys_, scored.template columns<Word>(), false});
        const bool all_are_finished = is_finished(first, all) && is_finished(first + rows - 1, all);
        for (std::int64_t row = 0; row < rows && !all_are_finished; ++row) {
          finish_row(first + row, scores_ + row * kTileKeys, all);
        }
        take_rows(first, rows, scores_, all);
      }
    }
  }

  // Far keys, 64 rows at a time: what none of them needs is skipped.
  void attend_kept_keys() {
    bool has_values = false;
    for (std::int64_t group = 0; group * common::kSkipRows < tile_.rows; ++group) {
      const auto is_far = [&](const Segment& s) {
        return s.first / common::kSkipRows == group && reaches(s, Reach::far);
      };
      Halves halves;
      for (const Segment& segment : segments_) {
        if (is_far(segment)) {
          vote(segment, halves);
        }
      }
      votes_.count(halves, group);
      if (!halves.any_kept()) {
        continue;
      }
      if (!has_values) {
        load_values();
        has_values = true;
      }
      const KeyRange range = halves.range(keys_, padded_keys_);
      for (const Segment& segment : segments_) {
        if (is_far(segment)) {
          attend_kept(segment, range);
        }
      }
    }
  }

  [[nodiscard]] float* voting_scores(std::int64_t n) const { return scores_ + n % common::kSkipRows * kTileKeys; }

  // Leaves the segment's scores, as they are where they are to be finished.
  void vote(const Segment& segment, Halves& halves) {
    const KeyRange all{0, keys_, padded_keys_};
    const std::int64_t columns =
        grouping_.finish ? words<Word>(segment.groups.count) : segment.template columns<Word>();
    KHatRows<Word> k_hat_rows;
    fuse_k(segment, k_transposed_, padded_keys_, k_hat_, k_hat_rows);
    Arithmetic::multiply({q_hat_ + segment.first * d_stride_, d_stride_, 1, k_hat_rows.data(),
                          voting_scores(segment.first), kTileKeys, segment.rows, padded_keys_, columns, false});
    std::array<float, kTileKeys> copy;
    for (std::int64_t n = segment.first; n < segment.first + segment.rows; ++n) {
      float* scores = voting_scores(n);
      if (grouping_.finish && !is_finished(n, all)) {
        std::copy_n(scores, padded_keys_, copy.data());
        scores = copy.data();
      }
      finish_row(n, scores, all);
      halves.add(scores, padded_keys_, votes_.bounds[static_cast<std::size_t>(n)]);
    }
  }

  void attend_kept(const Segment& segment, const KeyRange& range) {
    const common::Groups& groups = segment.groups;
    float* scores = voting_scores(segment.first) + range.first;
    if (grouping_.finish && groups.count < groups.columns) {
      KHatRows<Word> dropped;
      dropped_columns(segment, k_transposed_ + range.first, range.padded, k_hat_, dropped);
      Arithmetic::multiply({q_hat_ + segment.first * d_stride_ + words<Word>(groups.count), d_stride_, 1,
                            dropped.data(), scores, kTileKeys, segment.rows, range.padded,
                            words<Word>(groups.columns - groups.count), true});
    }
    for (std::int64_t n = 0; n < segment.rows; n += kRows) {
      const std::int64_t rows = std::min(kRows, segment.rows - n);
      for (std::int64_t row = n; row < n + rows && grouping_.finish; ++row) {
        finish_row(segment.first + row, scores + row * kTileKeys, range);
      }
      take_rows(segment.first + n, rows, scores + n * kTileKeys, range);
    }
  }

  void load_keys(std::int64_t keys) {
    keys_ = keys;
    padded_keys_ = round_up(keys, std::max<std::int64_t>(vector_length(), 4));
    const T* k = static_cast<const T*>(tensors_.k) + tile_.b * problem_.k.batch + h_kv_ * problem_.k.head;
    load_transposed(k + first_key_ * problem_.k.row, problem_.k.row, keys, problem_.head_dim, padded_keys_,
                    k_transposed_, kTileKeys);
  }

  void load_values() {
    const T* v = static_cast<const T*>(tensors_.v) + tile_.b * problem_.v.batch + h_kv_ * problem_.v.head +
                 first_key_ * problem_.v.row;
    load_summed_rows(v, problem_.v.row, keys_, problem_.head_dim_v, dv_stride_, v_, dv_stride_);
    if (value_scale_ != 1) {
      scale_row(v_, words<Word>(keys_) * dv_stride_, value_scale_);
    }
    outliers_.clear();
    take_outliers(v_, keys_, dv_stride_, dv_stride_, [&](const Outlier& outlier) { outliers_.push_back(outlier); });
  }

  // Whether row n's scores are finished: a row that sees all of a full tile is scaled on the way through the softmax.
  [[nodiscard]] bool is_finished(std::int64_t n, const KeyRange& range) const {
    return unit_.is_raw && range.keys == range.padded &&
           sees_all(problem_, tile_.first + n, first_key_ + range.first, range.keys);
  }

  void finish_row(std::int64_t n, float* scores, const KeyRange& range) const {
    if (!is_finished(n, range)) {
      finish_scores(problem_, mask_, unit_, tile_, n, first_key_ + range.first, range.keys, range.padded, scores);
    }
  }

  // Finished scores [rows, 128] of the range's keys to probabilities, up to the rows' sums, and O += P V.
  void take_rows(std::int64_t first, std::int64_t rows, float* scores, const KeyRange& range) {
    const Word* weights = p_;
    if constexpr (std::is_same_v<Word, float>) {
      weights = scores;
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t n = first + row;
      states_.attend(n, scores + row * kTileKeys, range.padded, unit_.to_log2, o_row(n), dv_stride_,
                     p_ + row * kTileKeys, !outliers_.empty());
    }
    Arithmetic::multiply({weights, kTileKeys, 1, v_rows_.data() + words<Word>(range.first), o_row(first), dv_stride_,
                          rows, round_up(problem_.head_dim_v, vector_length()), words<Word>(range.keys), true});
    for (const auto& [row, column, value] : outliers_) {
      if (const std::int64_t key = row - range.first; 0 <= key && key < range.keys) {
        add_outlier(value, {scores + key, scores + key, kTileKeys, rows}, o_row(first) + column, dv_stride_);
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
  ForwardScratch offsets_;
  RowStates states_;
  Word* q_hat_;            // [256, d]
  Word* q_;                // [256, d]; q_hat itself where all columns are kept, or no key is near
  Word* k_transposed_;     // [d, 128]
  Word* k_hat_;            // [r, 128]
  Word* v_;                // [128, dv]
  Word* p_;                // [24 or 64, 128], of pairs
  float* scores_;          // likewise; [64, 128] where halves are skipped
  float* o_;               // [256, dv]
  float value_scale_ = 1;  // a power of 2
  Segments segments_;
  std::int64_t first_key_ = 0, keys_ = 0, padded_keys_ = 0;  // of the tile of keys
  std::vector<Outlier> outliers_;                            // of V
  Votes votes_;
  std::array<const Word*, kTileKeys> v_rows_{};
};

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
