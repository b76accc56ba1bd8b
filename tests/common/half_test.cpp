// SPDX-License-Identifier: Apache-2.0
#include "common/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "common/element.h"

namespace distr::common {
namespace {

// The value of 16 bits with that many exponent and mantissa bits, from the definition.
double value_of(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return sign * (exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                               : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits));
}

template <class T>
void expect_values_and_round_trips(int exponent_bits, int mantissa_bits) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const T value{static_cast<std::uint16_t>(bits)};
    const double expected = value_of(value.bits, exponent_bits, mantissa_bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(to_float(value))) << bits;
      ASSERT_TRUE(std::isnan(to_float(from_float<T>(to_float(value))))) << bits;
    } else {
      ASSERT_EQ(to_float(value), expected) << bits;
      ASSERT_EQ(from_float<T>(to_float(value)).bits, bits);
    }
  }
}

TEST(Half, EveryPattern) {
  expect_values_and_round_trips<Float16>(5, 10);
  expect_values_and_round_trips<BFloat16>(8, 7);
}

// Between neighbours a and b: below the middle a, above it b, at the middle the even one; the same through double.
template <class T>
void expect_nearest_even(std::uint16_t infinity) {
  for (std::uint16_t bits = 0; bits + 1 < infinity; ++bits) {
    const double a = to_double(T{bits});
    const double b = to_double(T{static_cast<std::uint16_t>(bits + 1)});
    const double middle = (a + b) / 2;
    const std::uint16_t even = bits % 2 == 0 ? bits : static_cast<std::uint16_t>(bits + 1);
    ASSERT_EQ(from_double<T>(middle).bits, even) << bits;
    ASSERT_EQ(from_double<T>(middle * (1 - 0x1p-45)).bits, bits) << bits;
    ASSERT_EQ(from_double<T>(middle * (1 + 0x1p-45)).bits, bits + 1) << bits;
    ASSERT_EQ(from_double<T>(-middle * (1 + 0x1p-45)).bits, 0x8000 | (bits + 1)) << bits;
    ASSERT_EQ(from_float<T>(static_cast<float>(middle)).bits, even) << bits;
  }
}

TEST(Half, RoundsToNearestEvenFromFloatAndDouble) {
  expect_nearest_even<Float16>(0x7C00);
  expect_nearest_even<BFloat16>(0x7F80);
}

TEST(Half, LargeValuesBecomeInfinity) {
  EXPECT_EQ(from_float<Float16>(65519.0F).bits, 0x7BFF);
  EXPECT_EQ(from_float<Float16>(65520.0F).bits, 0x7C00);
  EXPECT_EQ(from_double<Float16>(-1e300).bits, 0xFC00);
  EXPECT_EQ(from_double<BFloat16>(1e300).bits, 0x7F80);
  EXPECT_EQ(from_float<BFloat16>(std::numeric_limits<float>::infinity()).bits, 0x7F80);
}

TEST(Convert, BetweenAllTypes) {
  const double source[] = {1.0, -2.5, 0.1, 1e-9, 70000.0};
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    std::array<std::byte, 5 * sizeof(double)> there{};
    std::array<double, 5> back{};
    convert(source, DType::f64, there.data(), dtype, 5);
    convert(there.data(), dtype, back.data(), DType::f64, 5);
    for (std::size_t n = 0; n < back.size(); ++n) {
      EXPECT_EQ(back[n], load(there.data(), dtype, static_cast<std::int64_t>(n)));
    }
    EXPECT_EQ(back[0], 1.0);
    EXPECT_EQ(back[1], -2.5);
  }
}

}  // namespace
}  // namespace distr::common
