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
#include <vector>

#include "cpu/operand-inl.h"
#include "cpu/pair_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

struct Outlier {
  std::int64_t row, column;
  float value;
};
using Outliers = std::vector<Outlier>;

// Value (row, column) of an operand that is summed over its rows.
inline float take_value(float& word, std::int64_t /*row*/) { return std::exchange(word, 0.0F); }
inline float take_value(Pair& word, std::int64_t row) {
  return common::to_float(std::exchange(word.halves[static_cast<std::size_t>(row % 2)], {}));
}
inline bool is_finite(float word, std::int64_t /*row*/) { return std::isfinite(word); }
inline bool is_finite(Pair word, std::int64_t row) {
  return std::isfinite(common::to_float(word.halves[static_cast<std::size_t>(row % 2)]));
}

// Takes what is not finite out of an operand [words of rows, stride] that a product sums over its rows, and leaves
// zeros. `columns`, at most the stride, a multiple of the vector length.
template <class Word>
Outliers take_outliers(Word* operand, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  constexpr std::int64_t kRowsPerWord = std::is_same_v<Word, float> ? 1 : 2;
  Outliers outliers;
  for (std::int64_t first = 0; first < rows; first += kRowsPerWord) {
    Word* row = operand + first / kRowsPerWord * stride;
    if (all_finite(row, columns)) {
      continue;
    }
    for (std::int64_t n = first; n < std::min(first + kRowsPerWord, rows); ++n) {
      for (std::int64_t c = 0; c < columns; ++c) {
        if (!is_finite(row[c], n)) {
          outliers.push_back({n, c, take_value(row[c], n)});
        }
      }
    }
  }
  return outliers;
}

// A product's other factor and its result: where the floats of an outlier's row or column lie, and those of the axis
// that an outlier does not have.
struct OtherFactor {
  const float* p;  // where it is 0 there is no weight
  const float* weights;
  std::int64_t by_row, by_other;
};
struct Sums {
  float* first;
  std::int64_t by_column, by_other;
};

// Adds the outliers of `rows` rows from first_row on, times `others` weights each.
inline void add_outliers(const Outliers& outliers, std::int64_t first_row, std::int64_t rows, std::int64_t others,
                         const OtherFactor& factor, const Sums& sums) {
  for (const Outlier& outlier : outliers) {
    const std::int64_t row = outlier.row - first_row;
    for (std::int64_t n = 0; 0 <= row && row < rows && n < others; ++n) {
      const std::int64_t at = row * factor.by_row + n * factor.by_other;
      if (factor.p[at] != 0) {
        sums.first[outlier.column * sums.by_column + n * sums.by_other] += factor.weights[at] * outlier.value;
      }
    }
  }
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
