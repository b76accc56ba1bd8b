// SPDX-License-Identifier: Apache-2.0
// Online softmax of one row, tile by tile (FlashAttention-2). Included once for each instruction set.
//
// exp(S_j - S_max) = 2^(to_log2 * (s_j - s_max)), where s are the scores in a unit of their own. The difference comes
// first, for it has no rounding where it matters; the rounding of a product to_log2 * s_j is as large as P's whole
// range once |S| reaches 2^28.
#if defined(DISTR_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_SOFTMAX_INL_H_
#undef DISTR_CPU_SOFTMAX_INL_H_
#else
#define DISTR_CPU_SOFTMAX_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <type_traits>

#include "cpu/operand-inl.h"
#include "cpu/pair_tile-inl.h"
#include "cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr float kHidden = -std::numeric_limits<float>::infinity();

// What the tiles so far say of a row: the sum of 2^(to_log2 * (s_j - maximum)), of which no exponent exceeds
// kRescaleThreshold. Every key hidden so far: maximum -inf, sum 0.
struct RowState {
  float maximum = kHidden;
  float sum = 0;
};

// 2^x = power * (1 + f * q).
template <class Vector>
struct PowerOf2 {
  Vector power, f, q;
};

// Of x <= 127, relative error below 1e-7; 0 below 2^-126, and for -inf; NaN stays NaN.
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE PowerOf2<Vector> split_power_of_2(Tag tag, Vector x) {
  const hn::RebindToSigned<Tag> int_tag;
  const Vector low = hn::Set(tag, -127.0F);
  x = hn::IfThenElse(hn::Lt(x, low), low, x);  // Max would lose a NaN on some targets
  // Where one unit in the last place is 1: adding rounds x, and leaves the rounded x + 127 in the lowest bits.
  const Vector rounder = hn::Set(tag, 0x1.8p23F + 127.0F);
  const Vector rounded = hn::Add(x, rounder);
  const Vector power = hn::BitCast(tag, hn::ShiftLeft<23>(hn::BitCast(int_tag, rounded)));
  const Vector f = hn::Sub(x, hn::Sub(rounded, rounder));  // -1/2 .. 1/2
  // 1 + f q(f), q fitted to the least largest relative error of 2^f.
  Vector p = hn::Set(tag, 0.00015353362F);
  p = hn::MulAdd(p, f, hn::Set(tag, 0.0013398875F));
  p = hn::MulAdd(p, f, hn::Set(tag, 0.009618437F));
  p = hn::MulAdd(p, f, hn::Set(tag, 0.055503324F));
  p = hn::MulAdd(p, f, hn::Set(tag, 0.24022648F));
  p = hn::MulAdd(p, f, hn::Set(tag, 0.6931472F));
  return {power, f, p};
}

// 2^x, likewise.
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE Vector power_of_2(Tag tag, Vector x) {
  const PowerOf2<Vector> split = split_power_of_2(tag, x);
  return hn::Mul(hn::MulAdd(split.q, split.f, hn::Set(tag, 1.0F)), split.power);
}

inline float power_of_2(float x) {
  const hn::CappedTag<float, 1> tag;
  return hn::GetLane(power_of_2(tag, hn::Set(tag, x)));
}

// scores = softcap * tanh(scores / softcap); `slopes`, unless null, the derivatives there. `count` a multiple of the
// vector length.
inline void cap_row(float* scores, std::int64_t count, double softcap, float* slopes) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  const auto cap = hn::Set(tag, static_cast<float>(softcap));
  const auto to_power = hn::Set(tag, static_cast<float>(-2 * std::numbers::log2e / softcap));
  const auto one = hn::Set(tag, 1.0F);
  for (std::int64_t j = 0; j < count; j += lanes) {
    const auto score = hn::LoadU(tag, scores + j);
    // tanh |x| = -m / (2 + m), where m = e^(-2 |x|) - 1, precise near 0 too.
    const auto split = split_power_of_2(tag, hn::Mul(hn::Abs(score), to_power));
    const auto m = hn::MulAdd(split.power, hn::Mul(split.f, split.q), hn::Sub(split.power, one));
    const auto tanh = hn::CopySign(hn::Div(m, hn::Add(m, hn::Add(one, one))), score);
    hn::StoreU(hn::Mul(cap, tanh), tag, scores + j);
    if (slopes != nullptr) {
      hn::StoreU(hn::NegMulAdd(tanh, tanh, one), tag, slopes + j);
    }
  }
}

// The largest of `count` scores (a multiple of the vector length); NaN may or may not count.
inline float row_maximum(const float* scores, std::int64_t count) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  auto maximum = hn::Set(tag, kHidden);
  for (std::int64_t j = 0; j < count; j += lanes) {
    maximum = hn::Max(hn::LoadU(tag, scores + j), maximum);
  }
  return hn::GetLane(hn::MaxOfLanes(tag, maximum));
}

// scores = 2^(to_log2 * (scores - maximum)); returns their sum. Of pairs, `rounded` gets what products read. `count` a
// multiple of the vector length.
template <class Word>
float exponentials(float* scores, std::int64_t count, float to_log2, float maximum, [[maybe_unused]] Word* rounded) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  const auto shift = hn::Set(tag, maximum);
  const auto factor = hn::Set(tag, to_log2);
  auto sum = hn::Zero(tag);
  std::int64_t j = 0;
  const auto next = [&] {
    const auto score = hn::LoadU(tag, scores + j);
    const auto p = power_of_2(tag, hn::Mul(hn::Sub(score, shift), factor));
    sum = hn::Add(sum, p);
    hn::StoreU(p, tag, scores + j);
    j += lanes;
    return p;
  };
#if DISTR_CPU_HAS_PAIRS
  if constexpr (std::is_same_v<Word, Pair>) {
    while (j + 2 * lanes <= count) {
      Pair* target = rounded + j / 2;
      const auto low = next();
      store_rounded(tag, low, next(), target);
    }
    if (j < count) {
      Pair* target = rounded + j / 2;
      store_rounded(tag, next(), target);
    }
  }
#endif
  while (j < count) {
    next();
  }
  return hn::GetLane(hn::SumOfLanes(tag, sum));
}

// What the largest exponent may reach: growing the maximum less often costs nothing, for sums of powers up to 2^8 are
// as precise as sums of powers up to 1.
inline constexpr float kRescaleThreshold = 8;

// Replaces the scores s of a row and a tile of keys by 2^(to_log2 * (s - maximum)), to_log2 > 0, and rescales what the
// row has gathered in o [o_count] when the maximum grows. `rounded` as for exponentials(). Both counts are multiples of
// the vector length.
template <class Word>
void online_softmax(float* scores, std::int64_t count, float to_log2, RowState& state, float* o, std::int64_t o_count,
                    Word* rounded) {
  const float maximum = row_maximum(scores, count);
  if ((maximum - state.maximum) * to_log2 > kRescaleThreshold) {
    const float shrink = power_of_2((state.maximum - maximum) * to_log2);
    state.sum *= shrink;
    state.maximum = maximum;
    scale_or_clear_row(o, o_count, shrink);
  }
  // Where every key is hidden so far, 2^(-inf - 0) = 0 is wanted, not 2^(-inf + inf).
  state.sum += exponentials(scores, count, to_log2, state.maximum == kHidden ? 0.0F : state.maximum, rounded);
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
