// SPDX-License-Identifier: Apache-2.0
#include "support/magnitudes.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace distr::test {
namespace {

// Powers of 2 that Q and K are multiplied by.
struct Powers {
  int q, k;
};

constexpr Powers kOfHalf[] = {{-20, 0}, {-10, 0}, {7, 0}, {14, 0}, {0, 14}, {7, 7}, {11, 11}, {14, 14}};
constexpr Powers kOfFloat[] = {{-100, 0}, {-50, -50}, {-10, 0}, {7, 0},  {13, 0},  {17, 0},  {20, 0}, {23, 0},
                               {27, 0},   {30, 0},    {33, 0},  {53, 0}, {100, 0}, {50, 50}, {0, 100}};

// To quarters up to 3.75, and those times a power of 2. So few bits that means and sums of columns need no rounding,
// nor do the scores before they are scaled: where two of them differ, they do in any order of summation.
void magnify(Buffer& buffer, int power) {
  for (std::int64_t n = 0; n < buffer.count(); ++n) {
    buffer.set(n, std::ldexp(std::clamp(std::round(buffer.at(n) * 4), -15.0, 15.0) / 4, power));
  }
}

}  // namespace

std::vector<Instance> magnified(const Case& test_case, Use use) {
  std::vector<Instance> result;
  const auto add = [&](const auto& all) {
    const Instance plain(test_case);
    // Sums of columns must be of the dtype's range too.
    const bool sums = test_case.grouping.strategy == Strategy::lsh && test_case.problem.dtype == DType::f16;
    for (const Powers& powers : all) {
      if (sums && powers.k > 11) {
        continue;
      }
      // dQ is as large as K, and dK as Q: beyond this f16 may hold the gradient and not a plain rounding of it.
      if (use == Use::backward && test_case.problem.dtype == DType::f16 && std::max(powers.q, powers.k) > 11) {
        continue;
      }
      Instance instance = plain;
      magnify(instance.q, powers.q);
      magnify(instance.k, powers.k);
      std::ostringstream name;
      name << test_case.name << ", Q * 2^" << powers.q << ", K * 2^" << powers.k;
      instance.test_case.name = name.str();
      result.push_back(instance);
    }
  };
  if (test_case.problem.dtype == DType::f16) {
    add(kOfHalf);
  } else {
    add(kOfFloat);
  }
  return result;
}

void scale_by_power(Buffer& buffer, int power) {
  for (std::int64_t n = 0; n < buffer.count(); ++n) {
    buffer.set(n, std::ldexp(buffer.at(n), power));
  }
}

std::vector<Instance> with_large_values(const Case& test_case) {
  const Problem& p = test_case.problem;
  std::vector<Instance> result;
  if (p.dtype == DType::f16) {
    return result;
  }
  for (const char* name : {"large values", "large values of random signs", "large values of one key"}) {
    Instance instance(test_case);
    const bool is_of_one_key = result.size() == 2;
    for (std::int64_t n = 0; n < instance.v.count(); ++n) {
      const double drawn = instance.v.at(n);
      const double size = is_of_one_key && n / p.v.row % p.seq_k != p.seq_k / 2 ? 0 : 1.75 - 0.75 / (1 + drawn * drawn);
      instance.v.set(n, result.empty() ? size : std::copysign(size, drawn));
    }
    instance.test_case.name += std::string(", ") + name;
    result.push_back(instance);
  }
  return result;
}

}  // namespace distr::test
