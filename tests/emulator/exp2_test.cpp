// SPDX-License-Identifier: Apache-2.0
// Compares exp2_by_polynomial() with 2^x in double precision. A GPU gives the same results, because the function uses
// fp32 arithmetic alone.
#include "cuda/exp2.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace distr::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Exp2ByPolynomial, ErrsByAtMostTwoUnitsOfFloat) {
  for (float x = -126; x < 127.499F; x += 0.000977F) {
    const double wanted = std::exp2(static_cast<double>(x));
    EXPECT_NEAR(exp2_by_polynomial(x) / wanted, 1, 2.4e-7) << "x = " << x;
  }
}

TEST(Exp2ByPolynomial, IsExactForIntegers) {
  for (int x = -126; x < 128; ++x) {
    EXPECT_EQ(exp2_by_polynomial(static_cast<float>(x)), std::ldexp(1.0F, x)) << "x = " << x;
  }
}

TEST(Exp2ByPolynomial, IsAlmostNothingBelowTheSmallestNormalNumber) {
  for (float x = -126.0001F; x > -127; x -= 0.01F) {
    EXPECT_GE(exp2_by_polynomial(x), 0) << "x = " << x;
    EXPECT_LE(exp2_by_polynomial(x), std::numeric_limits<float>::min()) << "x = " << x;
  }
  for (const float x : {-126.6F, -127.0F, -127.4F, -128.0F, -1000.0F, -1e30F, -kInfinity}) {
    EXPECT_EQ(exp2_by_polynomial(x), 0) << "x = " << x;
  }
}

TEST(Exp2ByPolynomial, OverflowsToInfinity) {
  for (const float x : {127.6F, 128.0F, 128.6F, 300.0F, 1e30F, kInfinity}) {
    EXPECT_EQ(exp2_by_polynomial(x), kInfinity) << "x = " << x;
  }
}

TEST(Exp2ByPolynomial, KeepsNaN) {
  // The first is what a GPU's arithmetic makes.
  for (const std::uint32_t bits : {0x7FFFFFFFU, 0x7FC00000U, 0xFFC00000U, 0x7F800001U}) {
    EXPECT_TRUE(std::isnan(exp2_by_polynomial(__uint_as_float(bits)))) << bits;
  }
}

}  // namespace
}  // namespace distr::cuda
