// SPDX-License-Identifier: Apache-2.0
// What the textbook skips (method, 8).
#include <algorithm>
#include <cmath>

#include "support/textbook.h"

namespace distr::test {
namespace {

// How far a kernel's scores may be from the true ones, as a part of the sum of |q k|: q_hat may be rounded with its
// scale.
double rounding_of_scores(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p-8;
    case DType::f16:
      return 0x1p-11;
    case DType::f32:
      return 0x1p-18;
    case DType::f64:
      break;
  }
  return 0x1p-40;
}

}  // namespace

// Decides what is skipped for rows first .. end - 1: a far half is kept where a score exceeds the log-sum-exp of its
// row's near scores by ln skip.
void TextbookRows::decide(std::int64_t first, std::int64_t end) {
  const Problem& p = instance_.test_case.problem;
  TextbookRows rows(instance_, {Precision::float64, p.dtype}, 0);
  const auto halves = static_cast<std::size_t>(ceil_div(p.seq_k, 64));
  std::vector<double> margin(halves, -kInfinity);
  std::vector<double> rounding(halves);
  skipped_ = {std::vector<char>(halves), std::vector<char>(halves), false};
  const double eps = rounding_of_scores(p.dtype);
  for (std::int64_t n = first; n < end; ++n) {
    const TextbookRow row = rows.unskipped_row(n);
    double max = -kInfinity;
    for (std::size_t j = 0; j < row.s.size(); ++j) {
      max = row.is_near[j] != 0 ? std::max(max, row.s[j]) : max;
    }
    double sum = 0;  // of exponentials, of which the largest is 1: scores may be beyond what has one
    for (std::size_t j = 0; j < row.s.size(); ++j) {
      sum += row.is_near[j] != 0 && row.s[j] != -kInfinity ? std::exp(row.s[j] - max) : 0;
    }
    const double threshold = sum == 0 ? -kInfinity : max + std::log(sum) + std::log(instance_.test_case.grouping.skip);
    for (std::size_t j = 0; j < row.s.size(); ++j) {
      if (row.is_near[j] != 0 || row.s[j] == -kInfinity) {
        continue;
      }
      const std::size_t half = j / 64;
      skipped_.seen[half] = 1;
      const double above = row.s[j] - threshold;
      if (above > margin[half]) {
        double size = 0;
        for (std::size_t c = 0; c < row.q.size(); ++c) {
          size += std::abs(row.q[c] * rows.k[j * row.q.size() + c]);
        }
        margin[half] = above;
        rounding[half] = eps * (1 + std::abs(p.softmax_scale()) * size);
      }
    }
  }
  for (std::size_t half = 0; half < halves; ++half) {
    skipped_.kept[half] = margin[half] > 0 ? 1 : 0;
    skipped_.is_close = skipped_.is_close || std::abs(margin[half]) < rounding[half];
  }
}

}  // namespace distr::test
