// SPDX-License-Identifier: Apache-2.0
#include "gpu/lengths_property.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "gpu/device_run.h"
#include "gpu/judge.h"
#include "gpu/properties.h"
#include "support/lengths.h"

namespace distr::test {
namespace {

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

// Two query heads that share a KV head, in sizes of our own.
Case gqa(std::int64_t batch, std::int64_t rows, std::int64_t keys, std::int64_t dim, DType dtype) {
  Case result = with_dtype(find("GQA"), dtype);
  Problem& p = result.problem;
  p.batch = batch;
  p.seq_q = rows;
  p.seq_k = keys;
  p.head_dim = p.head_dim_v = dim;
  p.heads_q = 2;
  p.heads_kv = 1;
  p = contiguous(p);
  return result;
}

// Of calls with so many rows that no kernel leaves them to one for few (sm90/heuristics.h), as it may those below.
template <class Kernel>
bool serves_lengths(const Kernel& kernel, LengthsAs kind, DType dtype) {
  const Case many = gqa(1, 1200, 300, 64, dtype);
  return kernel.supports(with_lengths(many.problem, kind), many.grouping).empty();
}

// Of a call of one sequence between neighbours of NaN, whether the kernel is asked for calls so short or not.
template <class Kernel>
std::string ends_anywhere(const Kernel& kernel, DType dtype) {
  if (!serves_lengths(kernel, LengthsAs::packed, dtype)) {
    return kNotAsked;
  }
  constexpr std::int64_t kLengths[] = {1, 63, 64, 65, 127, 128, 129, 200, 257};
  constexpr std::size_t kCount = std::size(kLengths);
  const auto judged = [&](Case test_case) {
    const Problem& p = test_case.problem;
    const std::string fault = judge_with_lengths(kernel, LengthsAs::packed, Instance(test_case));
    return fault.empty() ? fault
                         : std::to_string(p.seq_q) + " rows, " + std::to_string(p.seq_k) + " keys, d " +
                               std::to_string(p.head_dim) + (p.causal == Causal::none ? ": " : ", causal: ") + fault;
  };
  for (std::size_t n = 0; n < 2 * kCount; ++n) {
    // A row with one key has roundings alone for a gradient, whose bound is as small by luck.
    constexpr std::int64_t kLeast = std::is_same_v<Kernel, BackwardKernel> ? 2 : 1;
    const std::int64_t keys = std::max(kLeast, kLengths[n < kCount ? n : (n * 5 + 2) % kCount]);
    Case test_case = gqa(1, kLengths[n % kCount], keys, n % 3 == 0 ? 128 : 64, dtype);
    test_case.problem.causal = n % 2 == 0 ? Causal::bottom_right : Causal::none;
    if (const std::string fault = judged(test_case); !fault.empty()) {
      return fault;
    }
  }
  // So many sequences that a warp does not see all of them at once.
  return judged(gqa(40, 65, 66, 64, dtype));
}

// O and LSE of keys of these lengths, in turn.
std::vector<std::byte> with_keys(const ForwardKernel& kernel, Instance& instance, std::vector<std::int32_t> lengths) {
  const WithLengths<ForwardTensors> call(LengthsAs::keys, instance.test_case.problem, instance.forward());
  const Problem& p = call.problem();
  std::vector<std::int32_t> keys;
  for (std::size_t b = 0; b < static_cast<std::size_t>(p.batch); ++b) {
    keys.push_back(lengths[b % lengths.size()]);
  }
  ForwardTensors tensors = call.tensors();
  tensors.lengths.keys = keys.data();
  run_on_device(kernel, p, instance.test_case.grouping, tensors);
  const auto* const o = static_cast<const std::byte*>(tensors.o);
  return {o, o + static_cast<std::size_t>(p.batch * p.o.batch) * size_of(p.dtype)};
}

// Wherever sequences begin and end, run_on_device() sees what is touched beside the tensors. No row of Q is of two
// sequences: which of them writes it last may differ from run to run.
void with_starts(const ForwardKernel& kernel, Instance& instance) {
  const WithLengths<ForwardTensors> call(LengthsAs::packed, instance.test_case.problem, instance.forward());
  const std::vector<std::int32_t> wrong[] = {{-7, kMost, 3}, {kMost, -kMost, 0, 100}, {5, 4, 3, 2}};
  for (const auto& starts_of_q : wrong) {
    for (const auto& starts_of_k : wrong) {
      std::vector<std::int32_t> q, k;
      for (std::size_t b = 0; b <= static_cast<std::size_t>(call.problem().batch); ++b) {
        q.push_back(starts_of_q[std::min(b, starts_of_q.size() - 1)]);
        k.push_back(starts_of_k[std::min(b, starts_of_k.size() - 1)]);
      }
      ForwardTensors tensors = call.tensors();
      tensors.lengths.starts_q = q.data();
      tensors.lengths.starts_k = k.data();
      run_on_device(kernel, call.problem(), instance.test_case.grouping, tensors);
    }
  }
}

}  // namespace

std::string lengths_are_clamped(const ForwardKernel& kernel, DType dtype) {
  if (!serves_lengths(kernel, LengthsAs::keys, dtype) || !serves_lengths(kernel, LengthsAs::packed, dtype)) {
    return kNotAsked;
  }
  Instance instance(gqa(2, 150, 70, 16, dtype));
  with_starts(kernel, instance);
  const auto capacity = static_cast<std::int32_t>(with_lengths(instance.test_case.problem, LengthsAs::keys).seq_k);
  const bool same =
      with_keys(kernel, instance, {-5, kMost, capacity + 1}) == with_keys(kernel, instance, {0, capacity, capacity});
  return same ? "" : "lengths below 0 or above seq_k are not as 0 or seq_k";
}

std::string sequences_end_anywhere(const ForwardKernel& kernel, DType dtype) { return ends_anywhere(kernel, dtype); }
std::string sequences_end_anywhere(const BackwardKernel& kernel, DType dtype) { return ends_anywhere(kernel, dtype); }

}  // namespace distr::test
