// SPDX-License-Identifier: Apache-2.0
// All scores are 0, and each sum is of 4096 equal numbers, thirds, which one chain in fp32 makes 1.2e-5 too much or too
// little of: all roundings go one way. The textbook's sums are such chains, so the shared problems do not show it.
#include "gpu/sums_property.h"

#include <cmath>
#include <cstdint>
#include <string>

#include "gpu/device_run.h"
#include "gpu/properties.h"

namespace distr::test {
namespace {

constexpr std::int64_t kMany = 4096;
constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kDim = 8;
constexpr double kThird = 1.0 / 3;
constexpr double kTolerance = 2e-6;  // of a sum

Case even(std::int64_t rows, std::int64_t keys) {
  Case result;
  result.name = "sums";
  Problem& p = result.problem;
  p.heads_q = kHeads;
  p.heads_kv = 1;
  p.seq_q = rows;
  p.seq_k = keys;
  p.head_dim = p.head_dim_v = kDim;
  p.scale = 1;
  p = contiguous(p);
  result.grouping.strategy = Strategy::exact;
  return result;
}

double sign_of(std::int64_t element) { return element / kDim % 2 == 0 ? 1 : -1; }  // of the row: half of them negative

void set_rows(Buffer& buffer, double even_rows, double odd_rows) {
  for (std::int64_t n = 0; n < buffer.count(); ++n) {
    buffer.set(n, sign_of(n) > 0 ? even_rows : odd_rows);
  }
}

std::string far_from(const Buffer& found, double even_rows, double odd_rows, const char* name) {
  for (std::int64_t n = 0; n < found.count(); ++n) {
    const double wanted = sign_of(n) > 0 ? even_rows : odd_rows;
    if (!(std::abs(found.at(n) - wanted) <= kTolerance * std::abs(wanted))) {
      return std::string(name) + " is " + std::to_string(found.at(n)) + " at " + std::to_string(n) + " for " +
             std::to_string(wanted);
    }
  }
  return "";
}

// The gradients where V is 1 and -1 by turns, so that O is 0 and dS = +-P sum_c dO_c. Q is `q`, and K is `k` times V.
std::string judge_sums(const BackwardKernel& kernel, std::int64_t rows, std::int64_t keys, double q, double k) {
  Instance instance(even(rows, keys));
  const Problem& p = instance.test_case.problem;
  set_rows(instance.q, q, q);
  set_rows(instance.k, k, -k);
  set_rows(instance.v, 1, -1);
  set_rows(instance.o, 0, 0);
  for (std::int64_t n = 0; n < instance.lse.count(); ++n) {
    instance.lse.set(n, std::log(static_cast<double>(keys)));
  }
  Buffer d_o = instance.output(), d_q = instance.q, d_k = instance.k, d_v = instance.v;
  set_rows(d_o, kThird, kThird);
  BackwardTensors tensors{instance.q_data(), instance.k_data(), instance.v_data(),   nullptr,
                          nullptr,           instance.o.data(), instance.lse.data(), d_o.data()};
  tensors.d_q = d_q.data();
  tensors.d_k = d_k.data();
  tensors.d_v = d_v.data();
  run_on_device(kernel, p, instance.test_case.grouping, tensors);
  const double d_s = kThird * kDim / static_cast<double>(keys);
  const double times = static_cast<double>(rows * kHeads);
  const double wanted_v = times * kThird / static_cast<double>(keys);
  std::string fault = far_from(d_q, d_s * static_cast<double>(keys) * k, d_s * static_cast<double>(keys) * k, "dQ");
  fault = fault.empty() ? far_from(d_k, times * d_s * q, -times * d_s * q, "dK") : fault;
  return fault.empty() ? far_from(d_v, wanted_v, wanted_v, "dV") : fault;
}

}  // namespace

std::string long_sums_lose_little(const ForwardKernel& kernel, DType dtype) {
  const Case test_case = even(2, kMany);
  if (dtype != DType::f32 || !kernel.supports(test_case.problem, test_case.grouping).empty()) {
    return kNotAsked;
  }
  Instance instance(test_case);
  set_rows(instance.q, 0, 0);
  set_rows(instance.v, kThird, kThird);
  run_on_device(kernel, test_case.problem, test_case.grouping, instance.forward());
  return far_from(instance.o, kThird, kThird, "O");
}

std::string long_sums_lose_little(const BackwardKernel& kernel, DType dtype) {
  const Case test_case = even(2, kMany);
  if (dtype != DType::f32 || !kernel.supports(test_case.problem, test_case.grouping).empty()) {
    return kNotAsked;
  }
  const std::string of_rows = judge_sums(kernel, kMany / kHeads, 2, 1, 0);
  return of_rows.empty() ? judge_sums(kernel, 2, kMany, 0, 1) : of_rows;
}

}  // namespace distr::test
