// SPDX-License-Identifier: Apache-2.0
// fp16 and bf16 as bit patterns, because GCC 12 and Clang 14 have no portable type for both.
#pragma once

#include <bit>
#include <cstdint>

namespace distr::common {

struct Float16 {
  std::uint16_t bits = 0;
};

struct BFloat16 {
  std::uint16_t bits = 0;
};

[[nodiscard]] constexpr float to_float(float value) noexcept { return value; }
[[nodiscard]] constexpr float to_float(BFloat16 value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}
[[nodiscard]] constexpr float to_float(Float16 value) noexcept {
  const std::uint32_t sign = (value.bits & 0x8000U) << 16;
  const std::uint32_t magnitude = value.bits & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinity, NaN
    return std::bit_cast<float>(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
  }
  // Read as a float, the bits are the value times 2^-112. The product is exact, for subnormal values too.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
}

// Rounds to nearest even. A double is first rounded to float by round_to_odd(), which keeps the second rounding right.
template <class T>
[[nodiscard]] constexpr T from_float(float value) noexcept;

template <>
[[nodiscard]] constexpr float from_float<float>(float value) noexcept {
  return value;
}

template <>
[[nodiscard]] constexpr BFloat16 from_float<BFloat16>(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};  // NaN stays NaN
  }
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16)};
}

template <>
[[nodiscard]] constexpr Float16 from_float<Float16>(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U;  // NaN
  } else if (magnitude >= 0x477FF000U) {
    half = 0x7C00U;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000U) {
    // Subnormal: adding 1/2 rounds the value to a multiple of 2^-24, which is then in the low bits.
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - std::bit_cast<std::uint32_t>(0.5F);
  } else {
    half = (magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - 0x38000000U) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

// Rounds a double to float "to odd": the last bit of an inexact result is set. Rounding such a float to 16 bits gives
// what rounding the double once would have given.
[[nodiscard]] constexpr float round_to_odd(double value) noexcept {
  const auto nearest = static_cast<float>(value);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const double back = nearest;
  if (back == value || value != value || (bits & 1U) != 0 || (bits & 0x7F800000U) == 0x7F800000U) {
    return nearest;
  }
  const bool away = (back < 0 ? -back : back) > (value < 0 ? -value : value);
  return std::bit_cast<float>(away ? bits - 1 : bits + 1);
}

}  // namespace distr::common
