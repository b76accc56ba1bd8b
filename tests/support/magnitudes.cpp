// SPDX-License-Identifier: Apache-2.0
#include "support/magnitudes.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace distr::test {
namespace {

// Powers of 10 that Q and K are multiplied by.
struct Powers {
  int q, k;
};

constexpr Powers kOfHalf[] = {{-6, 0}, {-3, 0}, {2, 0}, {4, 0}, {0, 4}, {2, 2}, {3, 3}, {4, 3}, {4, 4}};
constexpr Powers kOfFloat[] = {{-30, 0}, {-10, 0}, {-3, 0}, {1, 0},  {2, 0},   {3, 0},   {4, 0},
                               {5, 0},   {6, 0},   {7, 0},  {8, 0},  {9, 0},   {10, 0},  {11, 0},
                               {12, 0},  {16, 0},  {20, 0}, {30, 0}, {-15, 0}, {15, 15}, {0, 30}};

// Of f16 the largest number: what lies beyond is not asked for.
void multiply(Buffer& buffer, int power) {
  const double most = buffer.dtype() == DType::f16 ? 65504 : 1e37;
  for (std::int64_t n = 0; n < buffer.count(); ++n) {
    buffer.set(n, std::clamp(buffer.at(n) * std::pow(10.0, power), -most, most));
  }
}

}  // namespace

std::vector<Instance> magnified(const Case& test_case) {
  std::vector<Instance> result;
  const auto add = [&](const auto& all) {
    const Instance plain(test_case);
    for (const Powers& powers : all) {
      Instance instance = plain;
      multiply(instance.q, powers.q);
      multiply(instance.k, powers.k);
      std::ostringstream name;
      name << test_case.name << ", Q * 1e" << powers.q << ", K * 1e" << powers.k;
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

}  // namespace distr::test
