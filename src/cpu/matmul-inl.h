// SPDX-License-Identifier: Apache-2.0
// C = A B (+ C) for tiles that lie in the cache. This file is included once for each instruction set.
#if defined(DISTR_CPU_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_MATMUL_INL_H_
#undef DISTR_CPU_MATMUL_INL_H_
#else
#define DISTR_CPU_MATMUL_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/operand-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The register tile: 6 x 4 vectors of C, 4 vectors of B and one broadcast of A fill 32 registers; 6 x 2 fill 16.
inline constexpr int kRegisterRows = 6;
inline constexpr int kRegisterVectors = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

// A is [m, k] with any strides, the rows of B [k, n] may lie anywhere, and C is [m, n] in row-major order. n is a
// multiple of the vector length. Of words that are pairs k counts the pairs.
template <class Word>
struct MatmulArguments {
  const Word* a;
  std::int64_t a_stride;  // from row to row
  std::int64_t a_step;    // from column to column
  const Word* const* b;
  float* c;
  std::int64_t c_stride;
  std::int64_t m, n, k;
  bool accumulate;  // C += A B
};

// Computes kRows x kVectors vectors of C, from row i and column j on, with all of them in registers.
template <class Word, int kRows, int kVectors>
void multiply_registers(const MatmulArguments<Word>& product, std::int64_t i, std::int64_t j) {
  const hn::ScalableTag<float> tag;
  using Vector = hn::Vec<decltype(tag)>;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  const Word* a = product.a + i * product.a_stride;
  float* c = product.c + i * product.c_stride + j;
  Vector sum[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      sum[row][v] = hn::Zero(tag);
    }
  }
  const std::int64_t depth = product.k;
  const std::int64_t a_stride = product.a_stride;
  const std::int64_t a_step = product.a_step;
  const Word* const* b_rows = product.b;
  for (std::int64_t k = 0; k < depth; ++k) {
    const Word* b_row = b_rows[k] + j;
    Vector b[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      b[v] = load_words(tag, b_row + v * lanes);
    }
    for (int row = 0; row < kRows; ++row) {
      const Vector a_value = broadcast(tag, a[row * a_stride]);
      for (int v = 0; v < kVectors; ++v) {
        sum[row][v] = multiply_add<Word>(a_value, b[v], sum[row][v]);
      }
    }
    a += a_step;
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* target = c + row * product.c_stride + v * lanes;
      // C is added last, so that the rounding of a long sum grows with the number of its parts, not of its terms.
      hn::StoreU(product.accumulate ? hn::Add(sum[row][v], hn::LoadU(tag, target)) : sum[row][v], tag, target);
    }
  }
}

template <class Word>
using MultiplyRegisters = void (*)(const MatmulArguments<Word>&, std::int64_t, std::int64_t);

template <class Word, int kVectors>
MultiplyRegisters<Word> choose_rows(std::int64_t rows) {
  static constexpr std::array<MultiplyRegisters<Word>, kRegisterRows> kByRows{
      multiply_registers<Word, 1, kVectors>, multiply_registers<Word, 2, kVectors>,
      multiply_registers<Word, 3, kVectors>, multiply_registers<Word, 4, kVectors>,
      multiply_registers<Word, 5, kVectors>, multiply_registers<Word, 6, kVectors>};
  return kByRows[static_cast<std::size_t>(rows - 1)];
}

template <class Word>
MultiplyRegisters<Word> choose_registers(std::int64_t rows, std::int64_t vectors) {
  if constexpr (kRegisterVectors == 4) {
    if (vectors == 4) {
      return choose_rows<Word, 4>(rows);
    }
    if (vectors == 3) {
      return choose_rows<Word, 3>(rows);
    }
  }
  return vectors == 2 ? choose_rows<Word, 2>(rows) : choose_rows<Word, 1>(rows);
}

// The rows of the next register tile: 6, except that two tiles share the last 7 to 11 rows evenly.
inline std::int64_t next_rows(std::int64_t left) {
  return left <= kRegisterRows ? left : left < 2 * kRegisterRows ? (left + 1) / 2 : kRegisterRows;
}

template <class Word>
void multiply(const MatmulArguments<Word>& product) {
  const hn::ScalableTag<float> tag;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  for (std::int64_t j = 0; j < product.n;) {
    const std::int64_t vectors = std::min<std::int64_t>((product.n - j) / lanes, kRegisterVectors);
    for (std::int64_t i = 0; i < product.m;) {
      const std::int64_t rows = next_rows(product.m - i);
      choose_registers<Word>(rows, vectors)(product, i, j);
      i += rows;
    }
    j += vectors * lanes;
  }
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
