// SPDX-License-Identifier: Apache-2.0
// The tile registers of Intel's AMX. Their instructions are written in assembly, in this place alone: compilers allow
// them in files that are built for AMX only, and a kernel is built once for each of Highway's instruction sets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace distr::cpu {

// A tile register holds so many rows of so many words of 32 bits.
inline constexpr std::int64_t kTileRegisterRows = 16;

// What configure() loads.
struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::array<std::uint8_t, 14> reserved{};
  std::array<std::uint16_t, 16> row_bytes{};  // of registers 0 to 7, then zeros
  std::array<std::uint8_t, 16> rows{};
};
inline constexpr TileConfiguration kFullTiles = [] {
  TileConfiguration full;
  for (std::size_t tile = 0; tile < 8; ++tile) {
    full.row_bytes[tile] = 4 * kTileRegisterRows;
    full.rows[tile] = kTileRegisterRows;
  }
  return full;
}();
static_assert(sizeof(TileConfiguration) == 64);

// Registers 0 to 7 of the thread. They hold something from configure() to release(); a thread that has released them is
// not slowed down by them.
struct AmxTiles {
  // Gives all registers their full size, and zeros.
  static void configure() { asm volatile("ldtilecfg %0" : : "m"(kFullTiles)); }
  static void release() { asm volatile("tilerelease"); }

  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c[tile]" : : [tile] "i"(kTile));
  }
  // `stride`: bytes from row to row.
  template <int kTile>
  static void load(const void* source, std::int64_t stride) {
    asm volatile("tileloadd (%[source],%[stride],1), %%tmm%c[tile]"
                 :
                 : [source] "r"(source), [stride] "r"(stride), [tile] "i"(kTile)
                 : "memory");
  }
  template <int kTile>
  static void store(void* target, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c[tile], (%[target],%[stride],1)"
                 :
                 : [target] "r"(target), [stride] "r"(stride), [tile] "i"(kTile)
                 : "memory");
  }
  // kSum += kA kB, where kA holds rows of pairs of bf16 and kB pairs of rows. Each instruction sums the products of the
  // pairs' first halves and those of the second ones, and adds both to what was there; subnormal numbers count as 0.
  template <int kSum, int kA, int kB>
  static void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c[b], %%tmm%c[a], %%tmm%c[sum]" : : [sum] "i"(kSum), [a] "i"(kA), [b] "i"(kB));
  }
};

}  // namespace distr::cpu
