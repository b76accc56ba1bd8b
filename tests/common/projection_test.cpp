// SPDX-License-Identifier: Apache-2.0
#include "common/projection.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "common/half.h"

namespace distr::common {
namespace {

// Known answers of the Random123 distribution.
TEST(Philox, KnownAnswers) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627E8D5U, 0xE169C58DU, 0xBC57AC4CU, 0x9B00DBD8U}));
  EXPECT_EQ(philox({~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}), (Words{0x408F276DU, 0x41C83B0EU, 0xA20BC7C6U, 0x6D5451FDU}));
  EXPECT_EQ(philox({0x243F6A88U, 0x85A308D3U, 0x13198A2EU, 0x03707344U}, {0xA4093822U, 0x299F31D0U}),
            (Words{0xD16CFE09U, 0x94FDCCEBU, 0x5001E420U, 0x24126EA1U}));
}

// The x with P(X <= x) = p, by bisection.
double normal_quantile_by_bisection(double p) {
  double low = -10;
  double high = 10;
  for (int step = 0; step < 200; ++step) {
    const double middle = (low + high) / 2;
    (std::erfc(-middle / std::sqrt(2.0)) / 2 < p ? low : high) = middle;
  }
  return low;
}

TEST(NormalQuantile, IsTheRoundedQuantile) {
  for (int index = 0; index < 256; ++index) {
    const double exact = normal_quantile_by_bisection((index + 0.5) / 256);
    const float rounded = to_float(from_float<BFloat16>(static_cast<float>(exact)));
    EXPECT_EQ(normal_quantile(static_cast<std::uint8_t>(index)), rounded) << "index " << index;
  }
}

TEST(NormalQuantile, IsExactInBothHalfTypes) {
  for (int index = 0; index < 256; ++index) {
    const float value = normal_quantile(static_cast<std::uint8_t>(index));
    EXPECT_EQ(to_float(from_float<Float16>(value)), value);
    EXPECT_EQ(to_float(from_float<BFloat16>(value)), value);
  }
}

TEST(ProjectionRow, TakesTheBytesOfPhiloxLowestFirst) {
  const auto words = philox({5, 1, 0, 0}, {0xDDDDDDDDU, 0xEEEEEEEEU});
  const auto row = projection_row(0xEEEEEEEEDDDDDDDDU, (std::int64_t{1} << 32) + 5);
  for (std::size_t t = 0; t < row.size(); ++t) {
    EXPECT_EQ(row[t], normal_quantile(static_cast<std::uint8_t>(words[t / 4] >> (8 * (t % 4)))));
  }
}

TEST(ProjectionRow, LooksStandardNormal) {
  double sum = 0;
  double squares = 0;
  constexpr int kRows = 4096;
  for (int n = 0; n < kRows; ++n) {
    for (const float value : projection_row(7, n)) {
      sum += value;
      squares += static_cast<double>(value) * value;
    }
  }
  constexpr double kCount = kRows * kHashBits;
  EXPECT_NEAR(sum / kCount, 0, 4 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1, 0.03);
}

TEST(GrayRank, InvertsTheGrayCode) {
  for (std::uint32_t rank = 0; rank < 65536; ++rank) {
    ASSERT_EQ(gray_rank(rank ^ (rank >> 1)), rank);
  }
}

TEST(GrayRank, NeighbouringRanksDifferInOneBit) {
  std::array<std::uint32_t, 65536> code_of{};
  for (std::uint32_t code = 0; code < 65536; ++code) {
    code_of[gray_rank(code)] = code;
  }
  for (std::size_t rank = 1; rank < code_of.size(); ++rank) {
    ASSERT_EQ(std::popcount(code_of[rank] ^ code_of[rank - 1]), 1);
  }
}

}  // namespace
}  // namespace distr::common
