// SPDX-License-Identifier: Apache-2.0
// C = A B (+ C) of pairs of bf16 in tile registers, for operands that lie in the cache. This file is included once for
// each instruction set.
#if defined(DISTR_CPU_TILE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_TILE_PRODUCT_INL_H_
#undef DISTR_CPU_TILE_PRODUCT_INL_H_
#else
#define DISTR_CPU_TILE_PRODUCT_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/amx_tiles.h"
#include "cpu/matmul-inl.h"
#include "cpu/tile-inl.h"

#if DISTR_CPU_HAS_PAIRS
HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

// 2 x 2 registers of C, two of A's rows and two of B's columns are all eight, and each product of two has one load.
// `Tiles`: AmxTiles, or what computes the same. Rows of B must be equally far apart. Registers are always full: rows of
// C behind the last go to a buffer, and where k does not fill the registers, both operands have zeros there, in copies.
template <class Tiles>
class TileProduct {
 public:
  explicit TileProduct(const MatmulArguments<Pair>& product)
      : product_(product),
        whole_(product.k / kSide * kSide),
        depth_(round_up(product.k, kSide)),
        b_stride_(product.k > 1 ? product.b[1] - product.b[0] : 0) {}

  void run() {
    pad_b();
    for (std::int64_t i = 0; i < product_.m; i += 2 * kSide) {
      const std::int64_t rows = std::min(2 * kSide, product_.m - i);
      load_a(i, rows);
      for (std::int64_t j = 0; j < product_.n; j += 2 * kSide) {
        const bool two_columns = j + kSide < product_.n;
        if (rows > kSide) {
          two_columns ? multiply_block<2, 2>(i, j, rows) : multiply_block<2, 1>(i, j, rows);
        } else {
          two_columns ? multiply_block<1, 2>(i, j, rows) : multiply_block<1, 1>(i, j, rows);
        }
      }
    }
  }

 private:
  static constexpr std::int64_t kSide = kTileRegisterRows;
  // All columns of Q and K are at most so many words, and the means of the keys two more.
  static constexpr std::int64_t kMaxDepth = kMaxHeadDim / 2 + kSide;
  static constexpr std::int64_t kMaxColumns = std::max(kMaxHeadDim, kTileKeys);
  static constexpr int kA = 4, kB = 6;  // the first registers of A and of B; those of C come before

  [[nodiscard]] Pair* a_copy() { return reinterpret_cast<Pair*>(a_copy_.data()); }  // [32, kMaxDepth]
  [[nodiscard]] Pair* b_end() { return reinterpret_cast<Pair*>(b_end_.data()); }    // [16, kMaxColumns]

  // Copies the last rows of B where they do not fill a register.
  void pad_b() {
    for (std::int64_t k = whole_; k < depth_; ++k) {
      Pair* row = b_end() + (k - whole_) * kMaxColumns;
      if (k < product_.k) {
        std::copy_n(product_.b[k], product_.n, row);
      } else {
        std::fill_n(row, product_.n, Pair{});
      }
    }
  }

  // Finds rows i .. i + rows of A, up to `depth_` words each: where they lie, or in a copy.
  void load_a(std::int64_t i, std::int64_t rows) {
    const Pair* a = product_.a + i * product_.a_stride;
    if (product_.a_step == 1 && rows % kSide == 0 && depth_ == product_.k) {
      a_ = a;
      a_stride_ = product_.a_stride;
      return;
    }
    a_ = a_copy();
    a_stride_ = kMaxDepth;
    if (product_.a_step != 1) {
      transpose_a(i, rows);
      return;
    }
    for (std::int64_t row = 0; row < round_up(rows, kSide); ++row) {
      Pair* target = a_copy() + row * kMaxDepth;
      const std::int64_t count = row < rows ? product_.k : 0;
      std::copy_n(a + row * product_.a_stride, count, target);
      std::fill_n(target + count, depth_ - count, Pair{});
    }
  }

  // A's columns lie as rows, padded to whole vectors: what is behind row m is computed with and dropped.
  void transpose_a(std::int64_t i, std::int64_t rows) {
    static constexpr std::array<float, kSide> kZeros{};
    std::array<const float*, kSide> columns{};  // whose bits are moved and never computed with
    for (std::int64_t row = 0; row < rows; row += kSide) {
      for (std::int64_t k = 0; k < depth_; k += kSide) {
        for (std::int64_t n = 0; n < kSide; ++n) {
          const Pair* column = product_.a + (k + n) * product_.a_step + i + row;
          columns[static_cast<std::size_t>(n)] =
              k + n < product_.k ? reinterpret_cast<const float*>(column) : kZeros.data();
        }
        Pair* target = a_copy() + row * kMaxDepth + k;
        transpose_square(columns, 0, reinterpret_cast<float*>(target), kMaxDepth);
      }
    }
  }

  // Where the register of C in this row and column of a block is loaded from and stored to.
  struct Place {
    float* data;
    std::int64_t stride;
  };
  [[nodiscard]] Place place(std::int64_t i, std::int64_t j, std::int64_t rows, std::int64_t row, std::int64_t column) {
    if (rows < (row + 1) * kSide) {
      return {c_end_.front().data() + column * kSide, 2 * kSide};
    }
    return {product_.c + (i + row * kSide) * product_.c_stride + j + column * kSide, product_.c_stride};
  }

  template <int kRow, int kColumn>
  void start(const Place& c) {
    if (product_.accumulate) {
      Tiles::template load<2 * kRow + kColumn>(c.data, c.stride * 4);
    } else {
      Tiles::template zero<2 * kRow + kColumn>();
    }
  }

  // Rows i .. i + rows and columns j .. j + 16 kColumns of C.
  template <int kRows, int kColumns>
  void multiply_block(std::int64_t i, std::int64_t j, std::int64_t rows) {
    const bool is_partial = rows < kRows * kSide;
    const std::int64_t last = (kRows - 1) * kSide;  // the first row of the last registers
    if (is_partial) {
      load_c_end(i + last, j, rows - last, kColumns * kSide);
    }
    const auto at = [&](std::int64_t row, std::int64_t column) { return place(i, j, rows, row, column); };
    start<0, 0>(at(0, 0));
    if constexpr (kColumns == 2) {
      start<0, 1>(at(0, 1));
    }
    if constexpr (kRows == 2) {
      start<1, 0>(at(1, 0));
    }
    if constexpr (kRows == 2 && kColumns == 2) {
      start<1, 1>(at(1, 1));
    }
    const Pair* b = whole_ > 0 ? product_.b[0] + j : nullptr;
    add_products<kRows, kColumns>(whole_, a_, a_stride_, b, b_stride_);
    add_products<kRows, kColumns>(depth_ - whole_, a_ + whole_, a_stride_, b_end() + j, kMaxColumns);
    store<0, 0>(at(0, 0));
    if constexpr (kColumns == 2) {
      store<0, 1>(at(0, 1));
    }
    if constexpr (kRows == 2) {
      store<1, 0>(at(1, 0));
    }
    if constexpr (kRows == 2 && kColumns == 2) {
      store<1, 1>(at(1, 1));
    }
    if (is_partial) {
      store_c_end(i + last, j, rows - last, kColumns * kSide);
    }
  }

  template <int kRows, int kColumns>
  static void add_products(std::int64_t depth, const Pair* a, std::int64_t a_stride, const Pair* b,
                           std::int64_t b_stride) {
    for (const Pair* end = a + depth; a < end; a += kSide, b += kSide * b_stride) {
      Tiles::template load<kB>(b, b_stride * 4);
      Tiles::template load<kA>(a, a_stride * 4);
      Tiles::template multiply_add<0, kA, kB>();
      if constexpr (kRows == 2) {
        Tiles::template load<kA + 1>(a + kSide * a_stride, a_stride * 4);
        Tiles::template multiply_add<2, kA + 1, kB>();
      }
      if constexpr (kColumns == 2) {
        Tiles::template load<kB + 1>(b + kSide, b_stride * 4);
        Tiles::template multiply_add<1, kA, kB + 1>();
      }
      if constexpr (kRows == 2 && kColumns == 2) {
        Tiles::template multiply_add<3, kA + 1, kB + 1>();
      }
    }
  }

  template <int kRow, int kColumn>
  void store(const Place& c) {
    Tiles::template store<2 * kRow + kColumn>(c.data, c.stride * 4);
  }

  void load_c_end(std::int64_t i, std::int64_t j, std::int64_t rows, std::int64_t columns) {
    if (product_.accumulate) {
      c_end_ = {};
      for (std::int64_t row = 0; row < rows; ++row) {
        std::copy_n(product_.c + (i + row) * product_.c_stride + j, columns,
                    c_end_[static_cast<std::size_t>(row)].data());
      }
    }
  }

  void store_c_end(std::int64_t i, std::int64_t j, std::int64_t rows, std::int64_t columns) {
    for (std::int64_t row = 0; row < rows; ++row) {
      std::copy_n(c_end_[static_cast<std::size_t>(row)].data(), columns,
                  product_.c + (i + row) * product_.c_stride + j);
    }
  }

  const MatmulArguments<Pair>& product_;
  std::int64_t whole_;     // rows of B that fill registers
  std::int64_t depth_;     // k, padded
  std::int64_t b_stride_;  // pairs from row to row
  const Pair* a_ = nullptr;
  std::int64_t a_stride_ = 0;
  // Set where they are used: arrays of Pair would begin as zeros, which takes as long as a product.
  alignas(64) std::array<std::uint32_t, 2 * kSide * kMaxDepth> a_copy_;
  alignas(64) std::array<std::uint32_t, kSide * kMaxColumns> b_end_;
  alignas(64) std::array<std::array<float, 2 * kSide>, kSide> c_end_;
};

// A call of its own: the copies are large.
template <class Tiles>
HWY_NOINLINE void multiply_in_tiles(const MatmulArguments<Pair>& product) {
  TileProduct<Tiles>(product).run();
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#endif
