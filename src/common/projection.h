// SPDX-License-Identifier: Apache-2.0
// The random projection R of the hash (method, 2.1). Philox4x32-10 draws its entries from the standard normal
// quantiles; they are the same on every backend.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace distr::common {

// N', the number of hash bits.
inline constexpr int kHashBits = 16;

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
[[nodiscard]] constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                                            std::array<std::uint32_t, 2> key) noexcept {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key = {key[0] + 0x9E3779B9U, key[1] + 0xBB67AE85U};
  }
  return counter;
}

// The quantiles (i + 1/2) / 256 of the standard normal distribution for i = 128 .. 255, rounded to bf16; fp16 holds
// them exactly too. Quantile 255 - i is minus quantile i.
inline constexpr std::array<float, 128> kUpperQuantiles = {0.0048828125F,    0.01470947265625F,
                                                           0.0245361328125F, 0.0341796875F,
                                                           0.044189453125F,  0.053955078125F,
                                                           0.0634765625F,    0.07373046875F,
                                                           0.08349609375F,   0.09326171875F,
                                                           0.10302734375F,   0.11279296875F,
                                                           0.12255859375F,   0.1328125F,
                                                           0.142578125F,     0.15234375F,
                                                           0.162109375F,     0.171875F,
                                                           0.1826171875F,    0.1923828125F,
                                                           0.2021484375F,    0.2119140625F,
                                                           0.2216796875F,    0.232421875F,
                                                           0.2421875F,       0.251953125F,
                                                           0.26171875F,      0.2734375F,
                                                           0.283203125F,     0.29296875F,
                                                           0.302734375F,     0.314453125F,
                                                           0.32421875F,      0.333984375F,
                                                           0.34375F,         0.35546875F,
                                                           0.365234375F,     0.375F,
                                                           0.38671875F,      0.396484375F,
                                                           0.408203125F,     0.41796875F,
                                                           0.4296875F,       0.439453125F,
                                                           0.451171875F,     0.4609375F,
                                                           0.47265625F,      0.482421875F,
                                                           0.494140625F,     0.50390625F,
                                                           0.515625F,        0.52734375F,
                                                           0.5390625F,       0.55078125F,
                                                           0.5625F,          0.57421875F,
                                                           0.5859375F,       0.59765625F,
                                                           0.609375F,        0.62109375F,
                                                           0.6328125F,       0.64453125F,
                                                           0.65625F,         0.66796875F,
                                                           0.6796875F,       0.69140625F,
                                                           0.70703125F,      0.71875F,
                                                           0.73046875F,      0.7421875F,
                                                           0.7578125F,       0.76953125F,
                                                           0.78125F,         0.796875F,
                                                           0.80859375F,      0.82421875F,
                                                           0.8359375F,       0.8515625F,
                                                           0.8671875F,       0.87890625F,
                                                           0.89453125F,      0.91015625F,
                                                           0.92578125F,      0.9375F,
                                                           0.953125F,        0.96875F,
                                                           0.984375F,        1.0F,
                                                           1.015625F,        1.03125F,
                                                           1.0546875F,       1.0703125F,
                                                           1.0859375F,       1.1015625F,
                                                           1.125F,           1.140625F,
                                                           1.15625F,         1.1796875F,
                                                           1.1953125F,       1.21875F,
                                                           1.2421875F,       1.265625F,
                                                           1.28125F,         1.3046875F,
                                                           1.328125F,        1.3515625F,
                                                           1.375F,           1.40625F,
                                                           1.4296875F,       1.4609375F,
                                                           1.484375F,        1.515625F,
                                                           1.546875F,        1.5859375F,
                                                           1.6171875F,       1.65625F,
                                                           1.6953125F,       1.7421875F,
                                                           1.7890625F,       1.8359375F,
                                                           1.890625F,        1.953125F,
                                                           2.03125F,         2.109375F,
                                                           2.203125F,        2.328125F,
                                                           2.515625F,        2.890625F};

[[nodiscard]] constexpr float normal_quantile(std::uint8_t index) noexcept {
  return index >= 128 ? kUpperQuantiles[index - 128U] : -kUpperQuantiles[127U - index];
}

// Row n of R. Byte t, counted from the lowest, of Philox(key = seed, counter = n) picks the quantile of hash bit t.
[[nodiscard]] constexpr std::array<float, kHashBits> projection_row(std::uint64_t seed, std::int64_t n) noexcept {
  const auto row = static_cast<std::uint64_t>(n);
  const auto words = philox({static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(row >> 32), 0, 0},
                            {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  std::array<float, kHashBits> result{};
  for (std::size_t t = 0; t < result.size(); ++t) {
    result[t] = normal_quantile(static_cast<std::uint8_t>(words[t / 4] >> (8 * (t % 4))));
  }
  return result;
}

// The rank of a code in the Gray sequence (the inverse Gray code). The codes of neighbouring ranks differ in one bit.
[[nodiscard]] constexpr std::uint32_t gray_rank(std::uint32_t code) noexcept {
  code ^= code >> 8;
  code ^= code >> 4;
  code ^= code >> 2;
  code ^= code >> 1;
  return code;
}

}  // namespace distr::common
