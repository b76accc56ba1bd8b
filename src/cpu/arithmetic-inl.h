// SPDX-License-Identifier: Apache-2.0
// The ways to compute products: of floats, of pairs of bf16 by vectors, and of pairs by tile registers. This file is
// included once for each instruction set.
#if defined(DISTR_CPU_ARITHMETIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DISTR_CPU_ARITHMETIC_INL_H_
#undef DISTR_CPU_ARITHMETIC_INL_H_
#else
#define DISTR_CPU_ARITHMETIC_INL_H_
#endif

#include <type_traits>

#include "cpu/matmul-inl.h"
#include "cpu/operand-inl.h"
#include "cpu/tile_product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

struct FloatArithmetic {
  using Word = float;  // what products read
  static constexpr Products kProducts = Products::of_floats;
  // A thread holds one while it multiplies.
  struct Session {};

  static void multiply(const MatmulArguments<Word>& product) { HWY_NAMESPACE::multiply(product); }
};

#if DISTR_CPU_HAS_PAIRS
struct PairArithmetic {
  using Word = Pair;
  static constexpr Products kProducts = Products::of_pairs;
  struct Session {};

  static void multiply(const MatmulArguments<Word>& product) { HWY_NAMESPACE::multiply(product); }
};

template <class Tiles>
struct TileArithmetic {
  using Word = Pair;
  static constexpr Products kProducts = Products::of_pairs_in_tiles;
  class Session {
   public:
    Session() { Tiles::configure(); }
    ~Session() { Tiles::release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  static void multiply(const MatmulArguments<Word>& product) { multiply_in_tiles<Tiles>(product); }
};
#endif

// Calls function(std::type_identity<T>{}, std::type_identity<Arithmetic>{}) for elements T and the products of them.
template <class Function>
void with_arithmetic(DType dtype, [[maybe_unused]] Products products, const Function& function) {
  common::with_element(dtype, [&]<class T>(std::type_identity<T> element) {
#if DISTR_CPU_HAS_PAIRS
    if constexpr (std::is_same_v<T, common::BFloat16>) {
      if (products == Products::of_pairs) {
        function(element, std::type_identity<PairArithmetic>{});
        return;
      }
      if (products == Products::of_pairs_in_tiles) {
        function(element, std::type_identity<TileArithmetic<AmxTiles>>{});
        return;
      }
    }
#endif
    if constexpr (!std::is_same_v<T, double>) {
      function(element, std::type_identity<FloatArithmetic>{});
    }
  });
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
