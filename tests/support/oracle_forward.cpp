// SPDX-License-Identifier: Apache-2.0
// The check of a forward against the textbook.
#include <algorithm>

#include "support/magnitudes.h"
#include "support/memo.h"
#include "support/textbook.h"

namespace distr::test {
namespace {

// Leaves out the rows for which rounding may decide otherwise what is skipped: gives them the truth.
void except_close_rows(const Result& truth, Result& got) {
  const std::size_t columns = truth.o.size() / std::max<std::size_t>(truth.lse.size(), 1);
  for (std::size_t n = 0; n < truth.is_close.size(); ++n) {
    if (truth.is_close[n] != 0) {
      got.lse[n] = truth.lse[n];
      std::copy_n(truth.o.begin() + static_cast<std::ptrdiff_t>(n * columns), columns,
                  got.o.begin() + static_cast<std::ptrdiff_t>(n * columns));
    }
  }
}

// The counts of kept halves, and how many rows are left out.
std::string judge_skipping(const Instance& instance, const Result& truth) {
  const Problem& p = instance.test_case.problem;
  const auto close = static_cast<std::size_t>(std::count(truth.is_close.begin(), truth.is_close.end(), 1));
  if (2 * close > truth.is_close.size()) {
    return std::to_string(close) + " of " + std::to_string(truth.is_close.size()) +
           " rows are so close to the threshold that nothing is checked";
  }
  const std::int64_t groups = ceil_div(p.seq_q, 64);
  for (std::size_t n = 0; n < truth.halves.size(); ++n) {
    const auto group = static_cast<std::int64_t>(n / 2);
    const auto row = static_cast<std::size_t>(group / groups * p.seq_q + group % groups * 64);
    if (truth.is_close[row] == 0 && instance.halves[n] != truth.halves[n]) {
      return "rows " + std::to_string(row) + " and on: halves " + (n % 2 == 0 ? "kept: " : "seen: ") +
             std::to_string(instance.halves[n]) + ", expected " + std::to_string(truth.halves[n]);
    }
  }
  return "";
}

// Checks what a forward wrote: O, and LSE if it was asked for.
std::string judge_results(const Instance& instance, Result got, Precision rounding, bool with_lse) {
  const Problem& p = instance.test_case.problem;
  if (!instance.o.canaries_intact() || !instance.lse.canaries_intact()) {
    return "wrote beside an output";
  }
  if (!kValuesAreJudged) {
    return "";
  }
  const Result truth = textbook(instance, Precision::float64);
  if (std::string skipping = judge_skipping(instance, truth); !skipping.empty()) {
    return skipping;
  }
  except_close_rows(truth, got);
  std::string fault;
  double o_error = 0;
  double lse_error = 0;
  for (std::int64_t rotation = 0; rotation < kPlainOrders; ++rotation) {
    const Result plain = textbook(instance, rounding, rotation);
    o_error = std::max(o_error, largest_error(plain.o, truth.o));
    lse_error = std::max(lse_error, largest_error(plain.lse, truth.lse));
    const std::string o_fault = judge(got.o, truth.o, o_error, p.dtype);
    const std::string lse_fault = with_lse ? judge(got.lse, truth.lse, lse_error, p.lse_dtype()) : "";
    fault = o_fault.empty() ? (lse_fault.empty() ? "" : "LSE: " + lse_fault) : "O: " + o_fault;
    if (fault.empty()) {
      break;
    }
  }
  return fault;
}

}  // namespace

std::string check_forward(Forward forward, Instance& instance) {
  forward(instance.test_case.problem, instance.test_case.grouping, instance.forward(), {});
  return judge_results(instance, written(instance.test_case.problem, instance.o, instance.lse), Precision::plain, true);
}

std::string check_forward_without_lse(Forward forward, Instance& instance, Precision rounding) {
  ForwardTensors tensors = instance.forward();
  tensors.lse = nullptr;
  forward(instance.test_case.problem, instance.test_case.grouping, tensors, {});
  return judge_results(instance, written(instance.test_case.problem, instance.o, instance.lse), rounding, false);
}

std::string check_forward_of_large_values(Forward forward, Instance& instance) {
  scale_by_power(instance.v, kLargePower);
  forward(instance.test_case.problem, instance.test_case.grouping, instance.forward(), {});
  scale_by_power(instance.v, -kLargePower);
  scale_by_power(instance.o, -kLargePower);
  return judge_results(instance, written(instance.test_case.problem, instance.o, instance.lse), Precision::plain, true);
}

}  // namespace distr::test
