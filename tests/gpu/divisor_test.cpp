// SPDX-License-Identifier: Apache-2.0
// Division by a product and a shift, held against the processor's own; needs no GPU.
#include "cuda/divisor.cuh"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace distr::cuda {
namespace {

constexpr std::uint32_t kLargest = 0x7FFFFFFFU;

void expect_right(std::uint32_t n, std::uint32_t value, const Divisor& divisor) {
  ASSERT_EQ(n / divisor, n / value) << n << " / " << value;
  ASSERT_EQ(n % divisor, n % value) << n << " % " << value;
}

// Where a quotient steps, and at both ends.
void expect_right_everywhere(std::uint32_t value, std::mt19937& random) {
  const Divisor divisor(value);
  ASSERT_EQ(divisor.value(), value);
  std::uniform_int_distribution<std::uint32_t> numbers(0, kLargest);
  std::vector<std::uint32_t> tried{0, 1, kLargest - 1, kLargest, kLargest / value * value};
  for (int i = 0; i < 20; ++i) {
    const std::uint32_t n = numbers(random);
    tried.insert(tried.end(), {n, n / value * value});
  }
  for (const std::uint32_t n : tried) {
    expect_right(n, value, divisor);
    if (n > 0) {
      expect_right(n - 1, value, divisor);
    }
  }
}

TEST(Divisor, IsRightForSmallValues) {
  std::mt19937 random(1);
  for (std::uint32_t value = 1; value <= 5000; ++value) {
    expect_right_everywhere(value, random);
  }
}

TEST(Divisor, IsRightAroundPowersOfTwo) {
  std::mt19937 random(2);
  for (int bit = 1; bit <= 31; ++bit) {
    const std::uint32_t power = 1U << bit;
    expect_right_everywhere(power - 1, random);
    expect_right_everywhere(power, random);
    if (power < kLargest) {
      expect_right_everywhere(power + 1, random);
    }
  }
}

TEST(Divisor, IsRightForRandomValues) {
  std::mt19937 random(3);
  std::uniform_int_distribution<std::uint32_t> values(1, kLargest);
  for (int i = 0; i < 20000; ++i) {
    expect_right_everywhere(values(random), random);
  }
}

TEST(Divisor, TakesZeroAsOne) {
  const Divisor divisor(0);
  EXPECT_EQ(divisor.value(), 1U);
  EXPECT_EQ(17 / divisor, 17U);
  EXPECT_EQ(17 % divisor, 0U);
}

}  // namespace
}  // namespace distr::cuda
