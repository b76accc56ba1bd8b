// SPDX-License-Identifier: Apache-2.0
// P and dS of one tile of queries against 128 keys. This file is included once for each instruction set.
#if defined(DISTR_CPU_SCORE_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_SCORE_GRADIENT_INL_H_
#undef DISTR_CPU_SCORE_GRADIENT_INL_H_
#else
#define DISTR_CPU_SCORE_GRADIENT_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numbers>

#include "cpu/arithmetic-inl.h"
#include "cpu/pair_segment-inl.h"
#include "cpu/segment-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// P = exp(S - LSE) and dS of one row from its scores and dP = dO V^T: scores become P, d_p becomes dS * factor.
// S = to_natural * scores is rounded as the forward rounds the largest, which a huge LSE is: the key that takes all has
// P = 1 there. A hidden key has P = 0 whatever LSE is, and a key of probability 0 has dS = 0 whatever its V. `count` a
// multiple of the vector length.
inline void row_gradient(float* scores, float* d_p, std::int64_t count, const Factor& to_natural, float lse, float d,
                         float factor) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  if (lse == kHidden) {
    std::fill_n(scores, count, 0.0F);
    std::fill_n(d_p, count, 0.0F);
    return;
  }
  const auto shift = hn::Set(tag, lse);
  const auto log2e = hn::Set(tag, std::numbers::log2e_v<float>);
  const auto ds = hn::Set(tag, d);
  const auto factors = hn::Set(tag, factor);
  for (std::int64_t j = 0; j < count; j += lanes) {
    const auto score = scaled(tag, hn::LoadU(tag, scores + j), to_natural);
    const auto hidden = hn::Eq(score, hn::Set(tag, kHidden));
    auto x = hn::Mul(hn::Sub(score, shift), log2e);
    x = hn::IfThenElse(hn::Gt(x, hn::Zero(tag)), hn::Zero(tag), x);  // P is 1 at most, whatever the rounding of LSE
    const auto p = hn::IfThenZeroElse(hidden, power_of_2(tag, x));
    const auto gradient = hn::Mul(hn::Mul(p, hn::Sub(hn::LoadU(tag, d_p + j), ds)), factors);
    hn::StoreU(p, tag, scores + j);
    hn::StoreU(hn::IfThenZeroElse(hn::Eq(p, hn::Zero(tag)), gradient), tag, d_p + j);
  }
}

// d_s *= slopes; a key of probability 0 keeps its 0, whatever its score was.
inline void multiply_slopes(float* d_s, const float* slopes, std::int64_t count) {
  const hn::ScalableTag<float> tag;
  for (std::int64_t j = 0; j < count; j += vector_length()) {
    const auto gradient = hn::LoadU(tag, d_s + j);
    const auto product = hn::Mul(gradient, hn::LoadU(tag, slopes + j));
    hn::StoreU(hn::IfThenZeroElse(hn::Eq(gradient, hn::Zero(tag)), product), tag, d_s + j);
  }
}

// What dS is the gradient of: scores as the softmax has them, or q_hat k_hat^T, which is scaled and capped before.
enum class GradientOf : std::uint8_t { scores, products };

// D = rowsum(dO * O) - dLSE of a tile's rows (method, 3). d: [batch, heads_q, seq_q].
template <class T>
void write_d(const Problem& problem, const BackwardTensors& tensors, const QueryTile& tile, float* d) {
  const std::int64_t start = tile.b * problem.o.batch + tile.h * problem.o.head;
  const std::int64_t columns = padded(problem.head_dim_v);
  alignas(64) std::array<float, kMaxHeadDim> o;
  alignas(64) std::array<float, kMaxHeadDim> d_o;
  for (std::int64_t n = 0; n < tile.rows; ++n) {
    const std::int64_t i = tile.first + n;
    const auto load = [&](const void* data, float* row) {
      load_rows(static_cast<const T*>(data) + start + i * problem.o.row, 0, 1, problem.head_dim_v, columns, row, 0);
    };
    load(tensors.o, o.data());
    load(tensors.d_o, d_o.data());
    float sum = dot(d_o.data(), o.data(), columns);
    if (tensors.d_lse != nullptr) {
      sum -= static_cast<const float*>(tensors.d_lse)[common::row_index(problem, tile.b, tile.h, i)];
    }
    d[row_number(problem, tile, n)] = sum;
  }
}

// One tile of queries against one strip of 128 keys: loads both and computes P and dS, from which all gradients follow.
template <class T, class Arithmetic>
class ScoreGradient {
 public:
  using Word = typename Arithmetic::Word;

  ScoreGradient(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors, const float* d,
                float* scratch)
      : problem_(problem),
        grouping_(grouping),
        tensors_(tensors),
        d_(d),
        mask_(problem.mask, tensors.mask),
        unit_(problem, mask_),
        d_stride_(padded(problem.head_dim)),
        dv_stride_(padded(problem.head_dim_v)) {
    const BackwardScratch offsets(problem, grouping, Arithmetic::kProducts);
    auto* operands = reinterpret_cast<Word*>(scratch);
    q_hat = operands + offsets.q_hat;
    d_o = operands + offsets.d_o;
    k_transposed_ = operands + offsets.k_transposed;
    k_hat_ = operands + offsets.k_hat;
    v_transposed_ = operands + offsets.v_transposed;
    p = scratch + offsets.p;
    d_s = scratch + offsets.d_s;
    for (std::int64_t c = 0; c < words<Word>(problem.head_dim_v); ++c) {
      v_rows_[static_cast<std::size_t>(c)] = v_transposed_ + c * kTileKeys;
    }
  }

  void load_keys(std::int64_t b, std::int64_t h_kv, std::int64_t first_key) {
    first_key_ = first_key;
    keys = std::clamp<std::int64_t>(problem_.seq_k - first_key, 0, kTileKeys);
    padded_keys = round_up(keys, std::max<std::int64_t>(vector_length(), 4));
    k_ = static_cast<const T*>(tensors_.k) + b * problem_.k.batch + h_kv * problem_.k.head + first_key * problem_.k.row;
    const T* v = static_cast<const T*>(tensors_.v) + b * problem_.v.batch + h_kv * problem_.v.head;
    load_transposed(k_, problem_.k.row, keys, problem_.head_dim, padded_keys, k_transposed_, kTileKeys);
    load_transposed(v + first_key * problem_.v.row, problem_.v.row, keys, problem_.head_dim_v, padded_keys,
                    v_transposed_, kTileKeys);
  }

  // Loads the strip's K [keys, stride] for a product that sums over the keys, padded with 0.
  void load_k(Word* target, std::int64_t stride) const {
    load_summed_rows(k_, problem_.k.row, keys, problem_.head_dim, stride, target, stride);
  }

  // Likewise dO [queries, stride].
  void load_d_o(Word* target, std::int64_t stride) const {
    load_summed_rows(o_start(tensors_.d_o), problem_.o.row, tile.rows, problem_.head_dim_v, stride, target, stride);
  }

  // The keys are loaded. Rows that they are near to take all columns.
  void load_queries(const QueryTile& query_tile) {
    tile = query_tile;
    const T* q = static_cast<const T*>(tensors_.q) + tile.b * problem_.q.batch + tile.h * problem_.q.head +
                 tile.first * problem_.q.row;
    segments = find_segments(problem_, grouping_, tensors_, tile);
    for (Segment& segment : segments) {
      if (is_near(segment)) {
        segment = segment.exact();
      }
      estimate_q(problem_, grouping_.estimator, segment, q, q_hat, d_stride_);
    }
    load_rows(o_start(tensors_.d_o), problem_.o.row, tile.rows, problem_.head_dim_v, dv_stride_, d_o, dv_stride_);
  }

  [[nodiscard]] bool is_near(const Segment& segment) const { return segment.near.has_key(first_key_); }

  // Computes P and dS from the keys and queries that are loaded.
  void run(GradientOf of) {
    for (const Segment& segment : segments) {
      KHatRows<Word> k_hat_rows;
      fuse_k(segment, k_transposed_, padded_keys, k_hat_, k_hat_rows);
      for (std::int64_t n = 0; n < segment.rows; n += kRows) {
        const std::int64_t first = segment.first + n;
        const std::int64_t rows = std::min(kRows, segment.rows - n);
        Arithmetic::multiply({q_hat + first * d_stride_, d_stride_, 1, k_hat_rows.data(), p + first * kTileKeys,
                              kTileKeys, rows, padded_keys, segment.template columns<Word>(), false});
        Arithmetic::multiply({d_o + first * dv_stride_, dv_stride_, 1, v_rows_.data(), d_s + first * kTileKeys,
                              kTileKeys, rows, padded_keys, words<Word>(problem_.head_dim_v), false});
        for (std::int64_t row = first; row < first + rows; ++row) {
          take_gradient(row, of);
        }
      }
    }
  }

  // k_hat [keys, stride] in floats.
  void fuse_by_key(const Segment& segment, float* k_hat, std::int64_t stride) const {
    fuse_k_by_key(segment, k_transposed_, padded_keys, k_hat, stride);
  }

  QueryTile tile{};
  Segments segments;
  std::int64_t keys = 0, padded_keys = 0;
  Word* q_hat;  // [128, d]
  Word* d_o;    // [128, dv]
  float* p;     // [128, 128]
  float* d_s;   // [128, 128]

 private:
  static constexpr std::int64_t kRows =
      backward_rows_per_step(Arithmetic::kProducts);  // that go through a step together

  [[nodiscard]] const T* o_start(const void* data) const {
    return static_cast<const T*>(data) + tile.b * problem_.o.batch + tile.h * problem_.o.head +
           tile.first * problem_.o.row;
  }

  // Turns the scores of row n into P, and its dP into dS.
  void take_gradient(std::int64_t n, GradientOf of) {
    const std::int64_t row = common::row_index(problem_, tile.b, tile.h, tile.first + n);
    const float lse = static_cast<const float*>(tensors_.lse)[row];
    float* scores = p + n * kTileKeys;
    const bool finished = unit_.is_raw && keys == padded_keys && sees_all(problem_, tile.first + n, first_key_, keys);
    std::array<float, kTileKeys> slopes;
    if (!finished) {
      finish_scores(problem_, mask_, unit_, tile, n, first_key_, keys, padded_keys, scores, slopes.data());
    }
    float* row_ds = d_s + n * kTileKeys;
    const float factor = of == GradientOf::products ? static_cast<float>(problem_.softmax_scale()) : 1;
    row_gradient(scores, row_ds, padded_keys, unit_.to_natural, lse, d_[row_number(problem_, tile, n)], factor);
    if (problem_.softcap != 0 && of == GradientOf::products) {
      multiply_slopes(row_ds, slopes.data(), padded_keys);
    }
  }

  const Problem& problem_;
  const Grouping& grouping_;
  const BackwardTensors& tensors_;
  const float* d_;  // D of all rows
  common::MaskView mask_;
  ScoreUnit unit_;
  std::int64_t d_stride_, dv_stride_;
  std::int64_t first_key_ = 0;
  const T* k_ = nullptr;  // of the strip
  Word* k_transposed_;    // [d, 128]
  Word* k_hat_;           // [r, 128]
  Word* v_transposed_;    // [dv, 128]
  std::array<const Word*, kMaxHeadDim> v_rows_{};
};

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
