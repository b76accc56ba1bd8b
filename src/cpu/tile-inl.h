// SPDX-License-Identifier: Apache-2.0
// Moves rows of any element type into tiles of floats and back. This file is included once for each instruction set.
#if defined(DISTR_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_TILE_INL_H_
#undef DISTR_CPU_TILE_INL_H_
#else
#define DISTR_CPU_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/element.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline std::int64_t vector_length() { return static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>())); }

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return common::ceil_div(value, multiple) * multiple;
}

inline void load_row(const float* source, std::int64_t count, float* target) { std::copy_n(source, count, target); }

inline void load_row(const common::BFloat16* source, std::int64_t count, float* target) {
  for (std::int64_t c = 0; c < count; ++c) {
    target[c] = common::to_float(source[c]);
  }
}

inline void load_row(const common::Float16* source, std::int64_t count, float* target) {
  const hn::ScalableTag<float> tag;
  const hn::Rebind<hwy::float16_t, decltype(tag)> half_tag;
  const std::int64_t lanes = vector_length();
  std::int64_t c = 0;
  for (; c + lanes <= count; c += lanes) {
    const auto half = hn::LoadU(half_tag, reinterpret_cast<const hwy::float16_t*>(source + c));
    hn::StoreU(hn::PromoteTo(tag, half), tag, target + c);
  }
  for (; c < count; ++c) {
    target[c] = common::to_float(source[c]);
  }
}

// target [rows, target_stride] = source [rows, columns]; the columns up to `padded` are 0.
template <class T>
void load_rows(const T* source, std::int64_t source_stride, std::int64_t rows, std::int64_t columns,
               std::int64_t padded, float* target, std::int64_t target_stride) {
  for (std::int64_t i = 0; i < rows; ++i) {
    float* row = target + i * target_stride;
    load_row(source + i * source_stride, columns, row);
    std::fill(row + columns, row + padded, 0.0F);
  }
}

// Operands of products that sum over the rows of `source` [rows, columns]: target [rows, target_stride] (of pairs: half
// as many), with zeros up to `padded` columns.
template <class T>
void load_summed_rows(const T* source, std::int64_t source_stride, std::int64_t rows, std::int64_t columns,
                      std::int64_t padded, float* target, std::int64_t target_stride) {
  load_rows(source, source_stride, rows, columns, padded, target, target_stride);
}
#if HWY_TARGET != HWY_SCALAR
// The transpose of four rows' vectors from column c on, within blocks of four lanes: block b of vector `column` holds
// column c + 4 b + column of the rows.
template <class Tag>
HWY_INLINE std::array<hn::Vec<Tag>, 4> transpose_blocks(Tag tag, const float* const* rows, std::int64_t c) {
  const hn::Repartition<double, Tag> pair_tag;
  const auto row0 = hn::LoadU(tag, rows[0] + c);
  const auto row1 = hn::LoadU(tag, rows[1] + c);
  const auto row2 = hn::LoadU(tag, rows[2] + c);
  const auto row3 = hn::LoadU(tag, rows[3] + c);
  const auto low01 = hn::BitCast(pair_tag, hn::InterleaveLower(tag, row0, row1));
  const auto low23 = hn::BitCast(pair_tag, hn::InterleaveLower(tag, row2, row3));
  const auto high01 = hn::BitCast(pair_tag, hn::InterleaveUpper(tag, row0, row1));
  const auto high23 = hn::BitCast(pair_tag, hn::InterleaveUpper(tag, row2, row3));
  return {hn::BitCast(tag, hn::InterleaveLower(pair_tag, low01, low23)),
          hn::BitCast(tag, hn::InterleaveUpper(pair_tag, low01, low23)),
          hn::BitCast(tag, hn::InterleaveLower(pair_tag, high01, high23)),
          hn::BitCast(tag, hn::InterleaveUpper(pair_tag, high01, high23))};
}
#endif

// Writes columns c .. c + 3 of four rows as four rows of `target`, four floats each.
inline void transpose_4x4(const std::array<const float*, 4>& rows, std::int64_t c, float* target,
                          std::int64_t target_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t row = 0; row < 4; ++row) {
    for (std::int64_t column = 0; column < 4; ++column) {
      target[column * target_stride + row] = rows[static_cast<std::size_t>(row)][c + column];
    }
  }
#else
  const hn::FixedTag<float, 4> tag;
  const auto columns = transpose_blocks(tag, rows.data(), c);
  for (std::size_t column = 0; column < 4; ++column) {
    hn::StoreU(columns[column], tag, target + static_cast<std::int64_t>(column) * target_stride);
  }
#endif
}

#if HWY_TARGET <= HWY_AVX3
// Rows and columns that are transposed at once.
inline constexpr std::int64_t kTransposed = 16;

// Writes columns c .. c + 15 of 16 rows as 16 rows of `target`: within blocks of four lanes first, then the blocks.
inline void transpose_square(const std::array<const float*, kTransposed>& rows, std::int64_t c, float* target,
                             std::int64_t target_stride) {
  const hn::ScalableTag<float> tag;
  std::array<std::array<hn::Vec<decltype(tag)>, 4>, 4> fours;  // of rows
  for (std::size_t four = 0; four < 4; ++four) {
    fours[four] = transpose_blocks(tag, rows.data() + 4 * four, c);
  }
  for (std::size_t column = 0; column < 4; ++column) {
    const auto a = fours[0][column], b = fours[1][column], e = fours[2][column], f = fours[3][column];
    const auto even_ab = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
    const auto even_ef = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(f), e);
    const auto odd_ab = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
    const auto odd_ef = hn::OddEvenBlocks(f, hn::SwapAdjacentBlocks(e));
    float* row = target + static_cast<std::int64_t>(column) * target_stride;
    hn::StoreU(hn::ConcatLowerLower(tag, even_ef, even_ab), tag, row);
    hn::StoreU(hn::ConcatLowerLower(tag, odd_ef, odd_ab), tag, row + 4 * target_stride);
    hn::StoreU(hn::ConcatUpperUpper(tag, even_ef, even_ab), tag, row + 8 * target_stride);
    hn::StoreU(hn::ConcatUpperUpper(tag, odd_ef, odd_ab), tag, row + 12 * target_stride);
  }
}
#else
inline constexpr std::int64_t kTransposed = 4;

inline void transpose_square(const std::array<const float*, kTransposed>& rows, std::int64_t c, float* target,
                             std::int64_t target_stride) {
  transpose_4x4(rows, c, target, target_stride);
}
#endif

// target [columns rounded up to kTransposed, target_stride] = the transpose of source [rows, columns]; the entries of
// row `rows` up to `padded` (a multiple of kTransposed) are 0.
template <class T>
void load_transposed(const T* source, std::int64_t source_stride, std::int64_t rows, std::int64_t columns,
                     std::int64_t padded, float* target, std::int64_t target_stride) {
  alignas(64) std::array<std::array<float, kMaxHeadDim>, kTransposed> buffer;
  const std::int64_t padded_columns = round_up(columns, kTransposed);
  std::array<const float*, kTransposed> some{};
  for (std::int64_t j = 0; j < padded; j += kTransposed) {
    for (std::int64_t n = 0; n < kTransposed; ++n) {
      const bool inside = j + n < rows;
      if constexpr (std::is_same_v<T, float>) {
        if (inside && columns == padded_columns) {
          some[static_cast<std::size_t>(n)] = source + (j + n) * source_stride;  // read in place
          continue;
        }
      }
      float* row = buffer[static_cast<std::size_t>(n)].data();
      some[static_cast<std::size_t>(n)] = row;
      if (inside) {
        load_row(source + (j + n) * source_stride, columns, row);
      }
      std::fill(row + (inside ? columns : 0), row + padded_columns, 0.0F);
    }
    for (std::int64_t c = 0; c < padded_columns; c += kTransposed) {
      transpose_square(some, c, target + c * target_stride + j, target_stride);
    }
  }
}

// target = the sum of rows of `count` floats, in the order given. `count` is a multiple of the vector
// length.
inline void add_rows(const float* const* rows, std::int64_t row_count, std::int64_t count, float* target) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  for (std::int64_t j = 0; j < count; j += lanes) {
    auto sum = hn::LoadU(tag, rows[0] + j);
    for (std::int64_t row = 1; row < row_count; ++row) {
      sum = hn::Add(sum, hn::LoadU(tag, rows[row] + j));
    }
    hn::StoreU(sum, tag, target + j);
  }
}

// x *= factor. `count` is a multiple of the vector length.
inline void scale_row(float* x, std::int64_t count, float factor) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  const auto factors = hn::Set(tag, factor);
  for (std::int64_t c = 0; c < count; c += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(tag, x + c), factors), tag, x + c);
  }
}

// A factor as the sum of two floats, because its rounding to fp32 would change large scores. Both parts have the same
// sign and the lower one is not 0, so that an infinity times the factor is infinite.
struct Factor {
  explicit Factor(double value) {
    const auto nearest = static_cast<float>(value);
    high = std::abs(static_cast<double>(nearest)) > std::abs(value) ? std::nextafter(nearest, 0.0F) : nearest;
    low = static_cast<float>(value - static_cast<double>(high));
    low = low == 0 ? high * 0x1p-60F : low;
  }
  float high, low;
};

// x * factor, of the same bits in every lane and for any vector length.
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE Vector scaled(Tag tag, Vector x, const Factor& factor) {
  return hn::MulAdd(x, hn::Set(tag, factor.high), hn::Mul(x, hn::Set(tag, factor.low)));
}

inline float scaled(float x, const Factor& factor) {
  const hn::CappedTag<float, 1> tag;
  return hn::GetLane(scaled(tag, hn::Set(tag, x), factor));
}

inline void scale_row(float* x, std::int64_t count, const Factor& factor) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  for (std::int64_t c = 0; c < count; c += lanes) {
    hn::StoreU(scaled(tag, hn::LoadU(tag, x + c), factor), tag, x + c);
  }
}

// Does what scale_row does, except that a factor of 0 gives 0 for every value, infinity and NaN included: what has no
// weight contributes nothing.
inline void scale_or_clear_row(float* x, std::int64_t count, float factor) {
  if (factor == 0) {
    std::fill_n(x, count, 0.0F);
  } else {
    scale_row(x, count, factor);
  }
}

// Whether no value is NaN or infinite. `count` is a multiple of the vector length.
inline bool all_finite(const float* x, std::int64_t count) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  auto zero_or_nan = hn::Zero(tag);
  for (std::int64_t c = 0; c < count; c += lanes) {
    zero_or_nan = hn::MulAdd(hn::LoadU(tag, x + c), hn::Zero(tag), zero_or_nan);
  }
  return hn::AllTrue(tag, hn::Eq(zero_or_nan, hn::Zero(tag)));
}

// The dot product of two rows. `count` is a multiple of the vector length.
inline float dot(const float* a, const float* b, std::int64_t count) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  auto sum = hn::Zero(tag);
  for (std::int64_t c = 0; c < count; c += lanes) {
    sum = hn::MulAdd(hn::LoadU(tag, a + c), hn::LoadU(tag, b + c), sum);
  }
  return hn::GetLane(hn::SumOfLanes(tag, sum));
}

template <class T>
void store_row(const float* source, std::int64_t count, T* target) {
  for (std::int64_t c = 0; c < count; ++c) {
    target[c] = common::from_float<T>(source[c]);
  }
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
