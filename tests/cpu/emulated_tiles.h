// SPDX-License-Identifier: Apache-2.0
// AmxTiles (src/cpu/amx_tiles.h) in plain C++, for CPUs that have no AMX.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/element.h"
#include "cpu/amx_tiles.h"

namespace distr::test {

struct EmulatedTiles {
  static constexpr std::size_t kRows = cpu::kTileRegisterRows;
  using Tile = std::array<std::array<float, kRows>, kRows>;  // of words of 32 bits

  // A register that is read outside of a session holds NaN.
  static void configure() { fill(0); }
  static void release() { fill(std::numeric_limits<float>::quiet_NaN()); }

  template <int kTile>
  static void zero() {
    tiles[kTile] = {};
  }
  template <int kTile>
  static void load(const void* source, std::int64_t stride) {
    for (std::size_t row = 0; row < kRows; ++row) {
      const auto* from = static_cast<const std::byte*>(source) + static_cast<std::int64_t>(row) * stride;
      std::memcpy(tiles[kTile][row].data(), from, sizeof(tiles[kTile][row]));
    }
  }
  template <int kTile>
  static void store(void* target, std::int64_t stride) {
    for (std::size_t row = 0; row < kRows; ++row) {
      auto* to = static_cast<std::byte*>(target) + static_cast<std::int64_t>(row) * stride;
      std::memcpy(to, tiles[kTile][row].data(), sizeof(tiles[kTile][row]));
    }
  }
  template <int kSum, int kA, int kB>
  static void multiply_add() {
    using Row = std::array<float, kRows>;
    std::array<std::array<Row, 2>, kRows> b;  // its first halves and its second ones, as floats
    for (std::size_t k = 0; k < kRows; ++k) {
      for (std::size_t n = 0; n < kRows; ++n) {
        const auto pair = halves(tiles[kB][k][n]);
        b[k][0][n] = pair[0];
        b[k][1][n] = pair[1];
      }
    }
    for (std::size_t m = 0; m < kRows; ++m) {
      std::array<Row, 2> sums{};
      for (std::size_t k = 0; k < kRows; ++k) {
        const auto a = halves(tiles[kA][m][k]);
        for (std::size_t half = 0; half < 2; ++half) {
          for (std::size_t n = 0; n < kRows; ++n) {
            // A product of two numbers of bf16 is a float, so this rounds once, as the instruction does.
            sums[half][n] = normal(a[half] * b[k][half][n] + sums[half][n]);
          }
        }
      }
      for (std::size_t n = 0; n < kRows; ++n) {
        tiles[kSum][m][n] = normal(normal(tiles[kSum][m][n]) + normal(sums[0][n] + sums[1][n]));
      }
    }
  }

 private:
  static void fill(float value) {
    for (Tile& tile : tiles) {
      for (auto& row : tile) {
        row.fill(value);
      }
    }
  }
  static std::array<float, 2> halves(float word) {
    std::array<common::BFloat16, 2> pair;
    static_assert(sizeof(pair) == sizeof(word));
    std::memcpy(static_cast<void*>(pair.data()), &word, sizeof(word));
    return {normal(common::to_float(pair[0])), normal(common::to_float(pair[1]))};
  }
  static float normal(float value) { return std::abs(value) < std::numeric_limits<float>::min() ? 0 : value; }

  static inline thread_local std::array<Tile, 8> tiles{};
};

}  // namespace distr::test
