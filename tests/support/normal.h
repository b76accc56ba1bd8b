// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <random>

namespace distr::test {

// std::normal_distribution<double> as libstdc++ has it, which asks for two logarithms of a constant, in long double,
// for each number that it takes from the generator.
class Normal {
 public:
  double operator()(std::mt19937_64& random) {
    if (has_kept_) {
      has_kept_ = false;
      return kept_;
    }
    while (true) {  // Marsaglia's polar method
      const double x = 2 * uniform(random) - 1;
      const double y = 2 * uniform(random) - 1;
      if (const double square = x * x + y * y; square > 0 && square <= 1) {
        const double factor = std::sqrt(-2 * std::log(square) / square);
        has_kept_ = true;
        kept_ = x * factor;
        return y * factor;
      }
    }
  }

 private:
  // Below 1.
  static double uniform(std::mt19937_64& random) {
    return std::min(static_cast<double>(random()) * 0x1p-64, 1 - 0x1p-53);
  }

  bool has_kept_ = false;
  double kept_ = 0;
};

}  // namespace distr::test
