// SPDX-License-Identifier: Apache-2.0
// The collective operations of a warp.
#pragma once

#include <cstdint>

namespace distr::emulator {

enum class Element : std::uint8_t { f16, bf16 };

// The fp32 value of every 16-bit element, by its bits.
[[nodiscard]] const float* widened_values(Element element);

// Eight sums that are made side by side.
using Vector [[gnu::vector_size(32), gnu::may_alias]] = float;

void warp_sync(std::uint32_t mask);
[[nodiscard]] std::uint32_t ballot(std::uint32_t mask, bool holds);
// Elects one lane, always the same. It is not lane 0, which a kernel could wrongly rely on.
[[nodiscard]] bool elect_one_sync();
// The 64 bits of lane `from` of the same segment of `width` lanes.
[[nodiscard]] std::uint64_t shuffle(std::uint32_t mask, std::uint64_t bits, int from);

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
void load_matrices(std::uint32_t (&r)[4], std::uint32_t shared, bool transposed);
void store_matrices(const std::uint32_t (&r)[4], std::uint32_t shared);

void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, Element element);

}  // namespace distr::emulator
