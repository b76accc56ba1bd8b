// SPDX-License-Identifier: Apache-2.0
// Merges attention over disjoint parts of the keys by the parts' LSE, or adds up parts that have none.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "common/element.h"
#include "kernel.h"

namespace distr {
inline namespace v0 {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

bool have_lse(std::span<const Partial> parts) { return parts.empty() || parts.front().lse != nullptr; }

// The log-sum-exp of the parts; -inf when no part saw a key.
double merged_lse(std::span<const Partial> parts, DType dtype, std::int64_t row) {
  double largest = kNegativeInfinity;
  for (const Partial& part : parts) {
    const double lse = common::load(part.lse, dtype, row);
    largest = std::isnan(lse) || lse > largest ? lse : largest;
  }
  if (largest == kNegativeInfinity) {
    return largest;
  }
  double sum = 0;
  for (const Partial& part : parts) {
    sum += std::exp(common::load(part.lse, dtype, row) - largest);
  }
  return largest + std::log(sum);
}

std::int64_t start_of(const Strides& strides, std::int64_t b, std::int64_t h, std::int64_t i) {
  return b * strides.batch + h * strides.head + i * strides.row;
}

void add_weighted(std::vector<double>& sum, double weight, const Partial& part, DType dtype, std::int64_t start) {
  for (std::size_t c = 0; c < sum.size() && weight != 0; ++c) {
    sum[c] += weight * common::load(part.o, dtype, start + static_cast<std::int64_t>(c));
  }
}

void merge_on_cpu(const Problem& problem, std::span<const Partial> parts, void* o, void* lse) {
  const DType lse_dtype = problem.lse_dtype();
  std::vector<double> sum(static_cast<std::size_t>(problem.head_dim_v));
  const std::int64_t rows = problem.batch * problem.heads_q * problem.seq_q;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t i = row % problem.seq_q;
    const std::int64_t h = row / problem.seq_q % problem.heads_q;
    const std::int64_t b = row / problem.seq_q / problem.heads_q;
    const double total = have_lse(parts) ? merged_lse(parts, lse_dtype, row) : 0;
    sum.assign(sum.size(), 0);
    for (const Partial& part : parts) {
      const double part_lse = part.lse != nullptr ? common::load(part.lse, lse_dtype, row) : 0;
      const double weight = part_lse == kNegativeInfinity ? 0 : std::exp(part_lse - total);
      add_weighted(sum, weight, part, part.dtype.value_or(problem.dtype),
                   start_of(part.strides.value_or(problem.o), b, h, i));
    }
    const std::int64_t start = start_of(problem.o, b, h, i);
    for (std::size_t c = 0; c < sum.size(); ++c) {
      common::store(o, problem.dtype, start + static_cast<std::int64_t>(c), sum[c]);
    }
    if (lse != nullptr) {
      common::store(lse, lse_dtype, row, total);
    }
  }
}

}  // namespace

void merge(const Problem& problem, std::span<const Partial> parts, void* o, void* lse, const Execution& execution) {
  validate(problem);
  if (problem.packed.has_value()) {
    throw Error(Status::invalid_argument, "packed sequences were given; allowed: none, as their parts are not merged");
  }
  for (const Partial& part : parts) {
    if (part.o == nullptr) {
      throw Error(Status::invalid_argument, "a part's O is null; allowed: memory of the problem's sizes");
    }
    if ((part.lse != nullptr) != have_lse(parts)) {
      throw Error(Status::invalid_argument, "some parts have an LSE and some have none; allowed: all, or none");
    }
  }
  if (!have_lse(parts) && lse != nullptr) {
    throw Error(Status::invalid_argument, "LSE is not null, and the parts have none; allowed: null, for a plain sum");
  }
  if (o == nullptr && problem.batch * problem.seq_q > 0) {
    throw Error(Status::invalid_argument, "O is null; allowed: memory of the problem's sizes");
  }
  if (problem.batch * problem.seq_q == 0) {
    return;
  }
  if (execution.device == Device::cuda) {
    cuda_merge(problem, parts, o, lse, execution);
  } else {
    merge_on_cpu(problem, parts, o, lse);
  }
}

}  // namespace v0
}  // namespace distr
