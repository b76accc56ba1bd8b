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

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <type_traits>

#include "cpu/operand-inl.h"
#include "cpu/pair_tile-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/tiling.h"

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

// 2^x = power * 2^f, -1/2 <= f <= 1/2.
template <class Vector>
struct SplitExponent {
  Vector power, f;
};

// Of x <= 127. power is 0 below 2^-126, and for -inf; f is NaN where x is.
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE SplitExponent<Vector> split_exponent(Tag tag, Vector x) {
  const hn::RebindToSigned<Tag> int_tag;
  const Vector low = hn::Set(tag, -127.0F);
#if HWY_ARCH_X86 && HWY_TARGET < HWY_EMU128
  x = hn::Max(low, x);  // on x86 the second argument where either is NaN
#else
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
#endif
  // Where one unit in the last place is 1: adding rounds x, and leaves the rounded x + 127 in the lowest bits.
  const Vector rounder = hn::Set(tag, 0x1.8p23F + 127.0F);
  const Vector rounded = hn::Add(x, rounder);
  const Vector power = hn::BitCast(tag, hn::ShiftLeft<23>(hn::BitCast(int_tag, rounded)));
  return {power, hn::Sub(x, hn::Sub(rounded, rounder))};
}

// (2^f - 1) / f, fitted to the least largest relative error of 2^f, below 1e-7.
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE Vector power_slope(Tag tag, Vector f) {
  Vector p = hn::Set(tag, 0.00015353362F);
  p = hn::MulAdd(p, f, hn::Set(tag, 0.0013398875F));
  p = hn::MulAdd(p, f, hn::Set(tag, 0.009618437F));
  p = hn::MulAdd(p, f, hn::Set(tag, 0.055503324F));
  p = hn::MulAdd(p, f, hn::Set(tag, 0.24022648F));
  return hn::MulAdd(p, f, hn::Set(tag, 0.6931472F));
}

// 2^x of x <= 127, relative error below 1e-7; 0 below 2^-126, and for -inf; NaN stays NaN.
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE Vector power_of_2(Tag tag, Vector x) {
  const SplitExponent<Vector> split = split_exponent(tag, x);
  return hn::Mul(hn::MulAdd(power_slope(tag, split.f), split.f, hn::Set(tag, 1.0F)), split.power);
}

// The same by one instruction less, relative error below 2e-7: for P that is rounded to bf16, and its sum.
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE Vector rough_power_of_2(Tag tag, Vector x) {
  const SplitExponent<Vector> split = split_exponent(tag, x);
  Vector slope = hn::Set(tag, 0.0013264727F);
  slope = hn::MulAdd(slope, split.f, hn::Set(tag, 0.009671513F));
  slope = hn::MulAdd(slope, split.f, hn::Set(tag, 0.055507336F));
  slope = hn::MulAdd(slope, split.f, hn::Set(tag, 0.24022242F));
  slope = hn::MulAdd(slope, split.f, hn::Set(tag, 0.693147F));
  return hn::Mul(hn::MulAdd(slope, split.f, hn::Set(tag, 1.0F)), split.power);
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
    const auto split = split_exponent(tag, hn::Mul(hn::Abs(score), to_power));
    const auto slope = power_slope(tag, split.f);
    const auto m = hn::MulAdd(split.power, hn::Mul(split.f, slope), hn::Sub(split.power, one));
    const auto tanh = hn::CopySign(hn::Div(m, hn::Add(m, hn::Add(one, one))), score);
    hn::StoreU(hn::Mul(cap, tanh), tag, scores + j);
    if (slopes != nullptr) {
      hn::StoreU(hn::NegMulAdd(tanh, tanh, one), tag, slopes + j);
    }
  }
}

// Each lane's largest of `count` scores (a multiple of the vector length); NaN may or may not count.
template <class Tag>
HWY_INLINE hn::Vec<Tag> largest_of_lanes(Tag tag, const float* scores, std::int64_t count) {
  const std::int64_t lanes = vector_length();
  auto maximum = hn::Set(tag, kHidden);
  for (std::int64_t j = 0; j < count; j += lanes) {
    maximum = hn::Max(hn::LoadU(tag, scores + j), maximum);
  }
  return maximum;
}

// P = 2^(to_log2 * (scores - maximum)), and adds each lane's sum to `sums`. Where products read pairs, `rounded` gets
// P; elsewhere, or if `keeps_floats`, it takes the scores' place. `count`: a multiple of the vector length.
template <class Word>
void exponentials(float* scores, std::int64_t count, float to_log2, float maximum, float* sums,
                  [[maybe_unused]] Word* rounded, bool keeps_floats) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  const auto shift = hn::Set(tag, maximum);
  const auto factor = hn::Set(tag, to_log2);
  auto sum = hn::Zero(tag);
  std::int64_t j = 0;
  const auto next = [&] {
    const auto x = hn::Mul(hn::Sub(hn::LoadU(tag, scores + j), shift), factor);
    hn::Vec<decltype(tag)> p;
    if constexpr (std::is_same_v<Word, float>) {
      p = power_of_2(tag, x);
    } else {
      p = rough_power_of_2(tag, x);
    }
    sum = hn::Add(sum, p);
    if (std::is_same_v<Word, float> || keeps_floats) {
      hn::StoreU(p, tag, scores + j);
    }
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
  // Last, so that the rounding of a long sum grows with the number of tiles.
  hn::StoreU(hn::Add(hn::LoadU(tag, sums), sum), tag, sums);
}

// What the largest exponent may reach: growing the maximum less often costs nothing, for sums of powers up to 2^8 are
// as precise as sums of powers up to 1.
inline constexpr float kRescaleThreshold = 8;

// The states of a tile's rows. Sums are kept by lanes, and added up where they are asked for.
class RowStates {
 public:
  explicit RowStates(float* sums) : sums_(sums) {}  // [rows, 16]

  void clear(std::int64_t rows) {
    std::fill_n(sums_, rows * kPadding, 0.0F);
    maxima_.fill(kHidden);
  }

  [[nodiscard]] RowState of(std::int64_t n) const {
    const hn::ScalableTag<float> tag;
    return {maxima_[static_cast<std::size_t>(n)], hn::GetLane(hn::SumOfLanes(tag, hn::LoadU(tag, sums_of(n))))};
  }

  // P of row n's scores s in a tile of keys, 2^(to_log2 * (s - maximum)), to_log2 > 0, as exponentials() leaves it.
  // When the maximum grows, rescales what the row has gathered, here and in o [o_count]. Both counts are multiples of
  // the vector length.
  template <class Word>
  void attend(std::int64_t n, float* scores, std::int64_t count, float to_log2, float* o, std::int64_t o_count,
              Word* rounded, bool keeps_floats) {
    const hn::ScalableTag<float> tag;
    float& maximum = maxima_[static_cast<std::size_t>(n)];
    const auto largest = largest_of_lanes(tag, scores, count);
    const auto growth = hn::Mul(hn::Sub(largest, hn::Set(tag, maximum)), hn::Set(tag, to_log2));
    if (!hn::AllTrue(tag, hn::Le(growth, hn::Set(tag, kRescaleThreshold)))) {
      const float of_row = hn::GetLane(hn::MaxOfLanes(tag, largest));
      if ((of_row - maximum) * to_log2 > kRescaleThreshold) {
        const float shrink = power_of_2((maximum - of_row) * to_log2);
        scale_row(sums_of(n), vector_length(), shrink);
        maximum = of_row;
        scale_or_clear_row(o, o_count, shrink);
      }
    }
    // Where every key is hidden so far, 2^(-inf - 0) = 0 is wanted, not 2^(-inf + inf).
    exponentials(scores, count, to_log2, maximum == kHidden ? 0.0F : maximum, sums_of(n), rounded, keeps_floats);
  }

  // Takes in what other tiles say of row n. What the row has gathered is to be multiplied by `keep`, and what they have
  // by `take`.
  struct Factors {
    float keep, take;
  };
  Factors merge(std::int64_t n, const RowState& other, float to_log2) {
    const RowState own = of(n);
    const float maximum = std::max(own.maximum, other.maximum);
    const float keep = own.maximum == maximum ? 1.0F : power_of_2((own.maximum - maximum) * to_log2);
    const float take = other.maximum == maximum ? 1.0F : power_of_2((other.maximum - maximum) * to_log2);
    maxima_[static_cast<std::size_t>(n)] = maximum;
    std::fill_n(sums_of(n), kPadding, 0.0F);
    *sums_of(n) = own.sum * keep + other.sum * take;
    return {keep, take};
  }

 private:
  [[nodiscard]] float* sums_of(std::int64_t n) const { return sums_ + n * kPadding; }

  float* sums_;
  std::array<float, kTaskQueries> maxima_;
};

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
