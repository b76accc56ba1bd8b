// SPDX-License-Identifier: Apache-2.0
// Loads tiles of pairs of bf16, and rounds floats to them. Compiled only where AVX512_BF16 may be there. This file is
// included once for each instruction set.
#if defined(DISTR_CPU_PAIR_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_PAIR_TILE_INL_H_
#undef DISTR_CPU_PAIR_TILE_INL_H_
#else
#define DISTR_CPU_PAIR_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "cpu/operand-inl.h"
#include "cpu/tile-inl.h"

#if DISTR_CPU_HAS_PAIRS
HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rounds to nearest even, NaN to NaN, subnormal numbers to 0: the values of `low`, then those of `high`.
template <class Vector>
HWY_INLINE Vector round_to_bf16(Vector low, Vector high) {
  Vector rounded;
  asm("vcvtne2ps2bf16 %[low], %[high], %[out]" : [out] "=v"(rounded.raw) : [low] "v"(low.raw), [high] "v"(high.raw));
  return rounded;
}

// target = pairs of neighbours in 2 vectors, or in one.
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE void store_rounded(Tag /*tag*/, Vector low, Vector high, Pair* target) {
  const hn::RebindToUnsigned<Tag> bits;
  hn::StoreU(hn::BitCast(bits, round_to_bf16(low, high)), bits, reinterpret_cast<std::uint32_t*>(target));
}
template <class Tag, class Vector = hn::Vec<Tag>>
HWY_INLINE void store_rounded(Tag tag, Vector low, Pair* target) {
  const hn::RebindToUnsigned<Tag> bits;
  const hn::Half<decltype(bits)> half;
  const auto pairs = hn::BitCast(bits, round_to_bf16(low, hn::Zero(tag)));
  hn::StoreU(hn::LowerHalf(half, pairs), half, reinterpret_cast<std::uint32_t*>(target));
}

// target = pairs of neighbours in a row. `count` is a multiple of the vector length.
inline void round_row(const float* row, std::int64_t count, Pair* target) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  std::int64_t j = 0;
  for (; j + 2 * lanes <= count; j += 2 * lanes) {
    store_rounded(tag, hn::LoadU(tag, row + j), hn::LoadU(tag, row + j + lanes), target + j / 2);
  }
  for (; j < count; j += lanes) {
    store_rounded(tag, hn::LoadU(tag, row + j), target + j / 2);
  }
}

// target = pairs of two rows' values. `second` may be null: zeros.
inline void round_rows(const float* first, const float* second, std::int64_t count, Pair* target) {
  const hn::ScalableTag<float> tag;
  const hn::RebindToUnsigned<decltype(tag)> bits;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  for (std::int64_t j = 0; j < count; j += lanes) {
    const auto second_values = second == nullptr ? hn::Zero(tag) : hn::LoadU(tag, second + j);
    // Both rows' values in the order of the row: lanes of 16 bits.
    const auto rounded = hn::BitCast(bits, round_to_bf16(hn::LoadU(tag, first + j), second_values));
    const hn::Half<decltype(bits)> half;
    const hn::Rebind<std::uint16_t, decltype(tag)> halves;
    const auto low = hn::PromoteTo(bits, hn::BitCast(halves, hn::LowerHalf(half, rounded)));
    const auto high = hn::PromoteTo(bits, hn::BitCast(halves, hn::UpperHalf(half, rounded)));
    hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), bits, reinterpret_cast<std::uint32_t*>(target + j));
  }
}

inline void load_row(const common::BFloat16* source, std::int64_t count, Pair* target) {
  if (count > 0) {
    target[words<Pair>(count) - 1] = {};
    std::memcpy(static_cast<void*>(target), source, static_cast<std::size_t>(count) * sizeof(common::BFloat16));
  }
}

// target [rows, target_stride] = source [rows, columns], two columns a word; words up to `padded` are 0.
inline void load_rows(const common::BFloat16* source, std::int64_t source_stride, std::int64_t rows,
                      std::int64_t columns, std::int64_t padded, Pair* target, std::int64_t target_stride) {
  for (std::int64_t i = 0; i < rows; ++i) {
    Pair* row = target + i * target_stride;
    load_row(source + i * source_stride, columns, row);
    std::fill(row + words<Pair>(columns), row + padded, Pair{});
  }
}

// target [padded] = pairs of two rows' values; `second` may be null: zeros.
inline void pair_rows(const common::BFloat16* first, const common::BFloat16* second, std::int64_t count,
                      std::int64_t padded, Pair* target) {
  const hn::ScalableTag<std::uint32_t> tag;
  const hn::Rebind<std::uint16_t, decltype(tag)> halves;
  const std::int64_t lanes = vector_length();
  const auto load = [&](const common::BFloat16* row) {
    return hn::PromoteTo(tag, hn::LoadU(halves, reinterpret_cast<const std::uint16_t*>(row)));
  };
  std::int64_t c = 0;
  for (; c + lanes <= count; c += lanes) {
    const auto high = second == nullptr ? hn::Zero(tag) : hn::ShiftLeft<16>(load(second + c));
    hn::StoreU(hn::Or(load(first + c), high), tag, reinterpret_cast<std::uint32_t*>(target + c));
  }
  for (; c < count; ++c) {
    target[c] = {{first[c], second == nullptr ? common::BFloat16{} : second[c]}};
  }
  std::fill(target + count, target + padded, Pair{});
}

inline void load_summed_rows(const common::BFloat16* source, std::int64_t source_stride, std::int64_t rows,
                             std::int64_t columns, std::int64_t padded, Pair* target, std::int64_t target_stride) {
  for (std::int64_t i = 0; i < rows; i += 2) {
    const common::BFloat16* first = source + i * source_stride;
    pair_rows(first, i + 1 < rows ? first + source_stride : nullptr, columns, padded, target + i / 2 * target_stride);
  }
}

// target [words of columns rounded up to kTransposed, target_stride] = the transpose of source [rows, columns], two
// columns a word; the entries of row `rows` up to `padded` (a multiple of kTransposed) are 0.
inline void load_transposed(const common::BFloat16* source, std::int64_t source_stride, std::int64_t rows,
                            std::int64_t columns, std::int64_t padded, Pair* target, std::int64_t target_stride) {
  std::array<std::array<std::uint32_t, kMaxHeadDim / 2>, kTransposed> buffer;  // not zeroed, as pairs would be
  const std::int64_t padded_words = round_up(words<Pair>(columns), kTransposed);
  std::array<const float*, kTransposed> some{};  // whose bits are moved and never computed with
  for (std::int64_t j = 0; j < padded; j += kTransposed) {
    for (std::int64_t n = 0; n < kTransposed; ++n) {
      if (j + n < rows && columns == 2 * padded_words) {  // read in place
        some[static_cast<std::size_t>(n)] = reinterpret_cast<const float*>(source + (j + n) * source_stride);
        continue;
      }
      auto* row = reinterpret_cast<Pair*>(buffer[static_cast<std::size_t>(n)].data());
      const std::int64_t inside = j + n < rows ? columns : 0;
      load_row(inside > 0 ? source + (j + n) * source_stride : nullptr, inside, row);
      std::fill(row + words<Pair>(inside), row + padded_words, Pair{});
      some[static_cast<std::size_t>(n)] = reinterpret_cast<const float*>(row);
    }
    for (std::int64_t w = 0; w < padded_words; w += kTransposed) {
      transpose_square(some, w, reinterpret_cast<float*>(target) + w * target_stride + j, target_stride);
    }
  }
}

// A column of K^T in pairs of neighbours, from key j on.
template <class Tag>
HWY_INLINE hn::Vec<Tag> column_of_pairs(Tag tag, const Pair* k_transposed, std::int64_t column, std::int64_t j) {
  const auto pairs = load_words(tag, k_transposed + column / 2 * kTileKeys + j);
  return column % 2 == 0 ? first_halves(tag, pairs) : second_halves(tag, pairs);
}

// target [words of count][128] = the columns of K that `columns` names, from K^T in pairs of neighbours.
inline void pick_columns(const Pair* k_transposed, const std::int32_t* columns, std::int64_t count,
                         std::int64_t padded_keys, Pair* target) {
  const hn::ScalableTag<float> tag;
  const hn::ScalableTag<std::uint32_t> bits;
  for (std::int64_t n = 0; n < count; n += 2) {
    for (std::int64_t j = 0; j < padded_keys; j += vector_length()) {
      const auto first = column_of_pairs(tag, k_transposed, columns[n], j);
      const auto second = n + 1 < count ? column_of_pairs(tag, k_transposed, columns[n + 1], j) : hn::Zero(tag);
      hn::StoreU(hn::BitCast(bits, pair_up(tag, first, second)), bits,
                 reinterpret_cast<std::uint32_t*>(target + n / 2 * kTileKeys + j));
    }
  }
}

// x *= factor, a power of 2; numbers below the normal ones lose bits. `count` is a multiple of the vector length.
inline void scale_row(Pair* x, std::int64_t count, float factor) {
  const hn::ScalableTag<float> tag;
  const hn::ScalableTag<std::uint32_t> bits;
  const auto factors = hn::Set(tag, factor);
  for (std::int64_t c = 0; c < count; c += vector_length()) {
    const auto pairs = load_words(tag, x + c);
    const auto scaled_pairs =
        pair_up(tag, hn::Mul(first_halves(tag, pairs), factors), hn::Mul(second_halves(tag, pairs), factors));
    hn::StoreU(hn::BitCast(bits, scaled_pairs), bits, reinterpret_cast<std::uint32_t*>(x + c));
  }
}

// Whether no value is NaN or infinite. `count` is a multiple of the vector length.
inline bool all_finite(const Pair* x, std::int64_t count) {
  const hn::ScalableTag<float> tag;
  auto zero_or_nan = hn::Zero(tag);
  for (std::int64_t c = 0; c < count; c += vector_length()) {
    const auto pairs = load_words(tag, x + c);
    zero_or_nan = hn::MulAdd(first_halves(tag, pairs), hn::Zero(tag), zero_or_nan);
    zero_or_nan = hn::MulAdd(second_halves(tag, pairs), hn::Zero(tag), zero_or_nan);
  }
  return hn::AllTrue(tag, hn::Eq(zero_or_nan, hn::Zero(tag)));
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#endif
