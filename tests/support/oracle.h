// SPDX-License-Identifier: Apache-2.0
// The truth that results are compared with: textbook attention, which holds N x N scores and shares no code with the
// library.
#pragma once

#include <string>
#include <vector>

#include "support/cases.h"

namespace distr::test {

struct Result {
  std::vector<double> o;            // [B, Hq, Nq, dv]
  std::vector<double> lse;          // [B, Hq, Nq]
  std::vector<char> is_close = {};  // [B, Hq, Nq]: rounding may decide otherwise what is skipped; empty: nothing is
  std::vector<std::int32_t> halves = {};  // [B, Hq, ceil(Nq / 64), 2]: kept, and seen; likewise

  bool operator==(const Result&) const = default;
};

enum class Precision {
  float64,           // everything in double
  plain,             // rounds q_hat, k_hat, P and O to the dtype; S, softmax and all sums in fp32
  plain_with_scale,  // the same, but where columns are grouped q_hat is rounded after it was multiplied by the scale
};

// softmax(scale * q_hat k_hat^T + mask) V with the instance's order. The sums over the groups begin with group
// `rotation`. The last answers of a thread are kept.
[[nodiscard]] Result textbook(const Instance& instance, Precision precision, std::int64_t rotation = 0);

struct Gradients {
  std::vector<double> d_q;     // [B, Hq, Nq, d]
  std::vector<double> d_k;     // [B, Hkv, Nk, d]
  std::vector<double> d_v;     // [B, Hkv, Nk, dv]
  std::vector<double> d_mask;  // in the mask's own shape
};

// The gradients of sum(dO * O) + sum(dLSE * LSE), dMask of an additive mask. `plain` rounds P, dS, q_hat, k_hat and the
// results. The last answers of a thread are kept.
[[nodiscard]] Gradients textbook_backward(const Instance& instance, const Result& forward, const Result& upstream,
                                          Precision precision, std::int64_t rotation = 0);

// What a kernel wrote, as dense doubles.
[[nodiscard]] Result written(const Problem& problem, const Buffer& o, const Buffer& lse);

// The tolerance rule (method, 4): NaN and infinity stand where the truth has them, and the largest error is at most
// twice that of the plain implementation plus a few eps. Returns "" if it holds, else the worst index, both values and
// the bound.
[[nodiscard]] std::string judge(const std::vector<double>& got, const std::vector<double>& truth, double plain_error,
                                DType dtype);
[[nodiscard]] double largest_error(const std::vector<double>& values, const std::vector<double>& truth);

// The plain implementation's error is one draw of its rounding, which can be small by luck where a single score
// decides. It is therefore taken over up to this many orders of summation, as few as settle the matter.
inline constexpr std::int64_t kPlainOrders = 4;

// Runs `forward` on the instance's poisoned outputs and checks O, LSE and the canaries.
using Forward = void (*)(const Problem&, const Grouping&, const ForwardTensors&, const Execution&);
[[nodiscard]] std::string check_forward(Forward forward, Instance& instance);
// The same without LSE. `forward` may round other values then.
[[nodiscard]] std::string check_forward_without_lse(Forward forward, Instance& instance, Precision rounding);
// The same with values times 2^kLargePower (magnitudes.h), and O divided by it.
[[nodiscard]] std::string check_forward_of_large_values(Forward forward, Instance& instance);

// Does the same for `backward`, from the textbook's O and LSE and random upstream gradients.
using Backward = void (*)(const Problem&, const Grouping&, const BackwardTensors&, const Execution&);
[[nodiscard]] std::string check_backward(Backward backward, Instance& instance);
// From O and LSE of a forward instead, as its caller has them. Where |LSE| is so large that its rounding decides P, the
// plain implementation's is of its own scores as well. `tolerated`: errors, beside those that the rule allows.
[[nodiscard]] std::string check_own_backward(Forward forward, Backward backward, Instance& instance,
                                             double tolerated = 0);

}  // namespace distr::test
