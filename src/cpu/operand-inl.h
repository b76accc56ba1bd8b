// SPDX-License-Identifier: Apache-2.0
// What products read: floats, or pairs of bf16 that AVX512_BF16 multiplies and sums at once. This file is included once
// for each instruction set.
#if defined(DISTR_CPU_OPERAND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_OPERAND_INL_H_
#undef DISTR_CPU_OPERAND_INL_H_
#else
#define DISTR_CPU_OPERAND_INL_H_
#endif

#include <hwy/highway.h>

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/element.h"
#include "cpu/tiling.h"

// Whether code for this instruction set may use AVX512_BF16. Whether the CPU has it is asked at run time.
#undef DISTR_CPU_HAS_PAIRS
#if HWY_TARGET <= HWY_AVX3
#define DISTR_CPU_HAS_PAIRS 1
#else
#define DISTR_CPU_HAS_PAIRS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Two neighbours along the axis that a product sums over.
struct alignas(4) Pair {
  std::array<common::BFloat16, 2> halves;
};

// A word of an operand is a float or a pair. So many words hold `count` values of an axis.
template <class Word>
constexpr std::int64_t words(std::int64_t count) {
  return std::is_same_v<Word, Pair> ? common::ceil_div(count, 2) : count;
}

// A row of pairs as values.
inline const common::BFloat16* values(const Pair* row) { return reinterpret_cast<const common::BFloat16*>(row); }

template <class Word>
constexpr Word one() {
  if constexpr (std::is_same_v<Word, float>) {
    return 1;
  } else {
    return {{common::from_float<common::BFloat16>(1), common::from_float<common::BFloat16>(1)}};
  }
}

// Puts the columns of a row side by side that `columns` names.
inline void put_columns(const float* row, const std::int32_t* columns, std::int64_t count, float* target) {
  for (std::int64_t n = 0; n < count; ++n) {
    target[n] = row[columns[n]];
  }
}
inline void put_columns(const common::BFloat16* row, const std::int32_t* columns, std::int64_t count, Pair* target) {
  for (std::int64_t n = 0; n < count; n += 2) {
    target[n / 2] = {{row[columns[n]], n + 1 < count ? row[columns[n + 1]] : common::BFloat16{}}};
  }
}
inline void put_columns(const Pair* row, const std::int32_t* columns, std::int64_t count, Pair* target) {
  put_columns(values(row), columns, count, target);
}

template <class Tag>
HWY_INLINE hn::Vec<Tag> load_words(Tag tag, const float* source) {
  return hn::LoadU(tag, source);
}
template <class Tag>
HWY_INLINE hn::Vec<Tag> load_words(Tag tag, const Pair* source) {
  const hn::RebindToUnsigned<Tag> bits;
  return hn::BitCast(tag, hn::LoadU(bits, reinterpret_cast<const std::uint32_t*>(source)));
}

template <class Tag>
HWY_INLINE hn::Vec<Tag> broadcast(Tag tag, float word) {
  return hn::Set(tag, word);
}
template <class Tag>
HWY_INLINE hn::Vec<Tag> broadcast(Tag tag, Pair word) {
  const hn::RebindToUnsigned<Tag> bits;
  return hn::BitCast(tag, hn::Set(bits, std::bit_cast<std::uint32_t>(word)));
}

// Returns sum + a b. Of pairs the instruction adds the product of the second halves first, then that of the first ones,
// and rounds after each; it takes subnormal numbers for 0. Highway 1.0.3 does not know it, nor do its compiler flags
// for AVX3 allow it, so it is written in assembly.
template <class Word, class Vector>
HWY_INLINE Vector multiply_add(Vector a, Vector b, Vector sum) {
  if constexpr (std::is_same_v<Word, float>) {
    return hn::MulAdd(a, b, sum);
  } else {
#if DISTR_CPU_HAS_PAIRS
    asm("vdpbf16ps %[b], %[a], %[sum]" : [sum] "+v"(sum.raw) : [a] "v"(a.raw), [b] "v"(b.raw));
#endif
    return sum;
  }
}

// The two halves of words as floats. pair_up() drops the lower 16 bits of each float.
template <class Tag>
HWY_INLINE hn::Vec<Tag> first_halves(Tag tag, hn::Vec<Tag> pairs) {
  const hn::RebindToUnsigned<Tag> bits;
  return hn::BitCast(tag, hn::ShiftLeft<16>(hn::BitCast(bits, pairs)));
}
template <class Tag>
HWY_INLINE hn::Vec<Tag> second_halves(Tag tag, hn::Vec<Tag> pairs) {
  const hn::RebindToUnsigned<Tag> bits;
  return hn::BitCast(tag, hn::And(hn::BitCast(bits, pairs), hn::Set(bits, 0xFFFF0000U)));
}
template <class Tag>
HWY_INLINE hn::Vec<Tag> pair_up(Tag tag, hn::Vec<Tag> first, hn::Vec<Tag> second) {
  const hn::RebindToUnsigned<Tag> bits;
  return hn::Or(hn::BitCast(tag, hn::ShiftRight<16>(hn::BitCast(bits, first))), second_halves(tag, second));
}

// Whether the code for this instruction set has products of pairs.
inline bool has_pairs() { return DISTR_CPU_HAS_PAIRS != 0; }

// Rows of floats [rows, 128] as a product takes them that sums over the rows.
template <class Word>
class SummedRows {
 public:
  explicit SummedRows(Word* scratch) : scratch_(scratch) {}

  // Pointers to the operand's rows, valid until the next call. `columns`: a multiple of the vector length.
  const Word* const* of(const float* tile, std::int64_t rows, std::int64_t columns) {
    for (std::int64_t n = 0; n < words<Word>(rows); ++n) {
      if constexpr (std::is_same_v<Word, float>) {
        rows_[static_cast<std::size_t>(n)] = tile + n * kTileKeys;
      } else {
        Word* row = scratch_ + n * kTileKeys;
        const float* first = tile + 2 * n * kTileKeys;
        round_rows(first, 2 * n + 1 < rows ? first + kTileKeys : nullptr, columns, row);
        rows_[static_cast<std::size_t>(n)] = row;
      }
    }
    return rows_.data();
  }

 private:
  Word* scratch_;  // [64, 128], for pairs
  std::array<const Word*, kTileQueries> rows_{};
};

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
