// SPDX-License-Identifier: Apache-2.0
#include "gpu/lengths_property.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gpu/device_run.h"
#include "gpu/properties.h"
#include "support/lengths.h"

namespace distr::test {
namespace {

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

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

// Wherever sequences begin and end, run_on_device() sees what is touched beside the tensors.
void with_starts(const ForwardKernel& kernel, Instance& instance) {
  const WithLengths<ForwardTensors> call(LengthsAs::packed, instance.test_case.problem, instance.forward());
  const std::vector<std::int32_t> wrong[] = {{-7, kMost, 3}, {kMost, -kMost, 0, 100}, {5, 4, 3, 2}};
  for (const auto& starts_of_q : wrong) {
    for (const auto& starts_of_k : wrong) {
      std::vector<std::int32_t> q, k;
      for (std::size_t b = 0; b <= static_cast<std::size_t>(call.problem().batch); ++b) {
        q.push_back(starts_of_q[b % starts_of_q.size()]);
        k.push_back(starts_of_k[b % starts_of_k.size()]);
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
  Instance instance(with_dtype(find("GQA"), dtype));
  const Case& test_case = instance.test_case;
  const auto serves = [&](LengthsAs kind) {
    return kernel.supports(with_lengths(test_case.problem, kind), test_case.grouping).empty();
  };
  if (!serves(LengthsAs::keys) || !serves(LengthsAs::packed)) {
    return kNotAsked;
  }
  with_starts(kernel, instance);
  const auto capacity = static_cast<std::int32_t>(with_lengths(test_case.problem, LengthsAs::keys).seq_k);
  const bool same =
      with_keys(kernel, instance, {-5, kMost, capacity + 1}) == with_keys(kernel, instance, {0, capacity, capacity});
  return same ? "" : "lengths below 0 or above seq_k are not as 0 or seq_k";
}

}  // namespace distr::test
