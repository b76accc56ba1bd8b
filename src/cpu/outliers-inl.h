// SPDX-License-Identifier: Apache-2.0
// NaN and infinities of a product's operand, which count only where the other factor has weight: a key that a row does
// not see, or whose probability is 0, contributes nothing, and 0 times NaN would be NaN. They are taken out of the
// operand, so that the product has the bits that it has without them, and are added behind it. This file is included
// once for each instruction set.
#if defined(DISTR_CPU_OUTLIERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_OUTLIERS_INL_H_
#undef DISTR_CPU_OUTLIERS_INL_H_
#else
#define DISTR_CPU_OUTLIERS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/operand-inl.h"
#include "cpu/pair_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

struct Outlier {
  std::int64_t row, column;
  float value;
};

// Value (row, column) of an operand that is summed over its rows.
inline float take_value(float& word, std::int64_t /*row*/) { return std::exchange(word, 0.0F); }
inline float take_value(Pair& word, std::int64_t row) {
  return common::to_float(std::exchange(word.halves[static_cast<std::size_t>(row % 2)], {}));
}
inline bool is_finite(float word, std::int64_t /*row*/) { return std::isfinite(word); }
inline bool is_finite(Pair word, std::int64_t row) {
  return std::isfinite(common::to_float(word.halves[static_cast<std::size_t>(row % 2)]));
}

// Takes what is not finite out of an operand [words of rows, stride] that a product sums over its rows, leaves zeros,
// and calls visit(Outlier) for each. `columns`, at most the stride, is a multiple of the vector length. A backward's
// visit must not throw: other tasks wait for the one that takes it.
template <class Word, class Visit>
void take_outliers(Word* operand, std::int64_t rows, std::int64_t columns, std::int64_t stride, const Visit& visit) {
  constexpr std::int64_t kRowsPerWord = std::is_same_v<Word, float> ? 1 : 2;
  for (std::int64_t first = 0; first < rows; first += kRowsPerWord) {
    Word* row = operand + first / kRowsPerWord * stride;
    if (all_finite(row, columns)) {
      continue;
    }
    for (std::int64_t n = first; n < std::min(first + kRowsPerWord, rows); ++n) {
      for (std::int64_t c = 0; c < columns; ++c) {
        if (!is_finite(row[c], n)) {
          visit(Outlier{n, c, take_value(row[c], n)});
        }
      }
    }
  }
}

// The weights that an outlier is multiplied with, one for each index of the product's other axis, `stride` floats
// apart.
struct Weights {
  const float* p;  // where it is 0 there is no weight
  const float* values;
  std::int64_t stride;
  std::int64_t count;
};

// sums[n * stride] += weight n * value.
inline void add_outlier(float value, const Weights& weights, float* sums, std::int64_t stride) {
  for (std::int64_t n = 0; n < weights.count; ++n) {
    if (weights.p[n * weights.stride] != 0) {
      sums[n * stride] += weights.values[n * weights.stride] * value;
    }
  }
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
