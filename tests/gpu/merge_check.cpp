// SPDX-License-Identifier: Apache-2.0
#include "gpu/merge_check.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "distr/attention.h"
#include "distr/device.h"
#include "gpu/device_run.h"
#include "support/cases.h"
#include "support/normal.h"
#include "support/oracle.h"

namespace distr::test {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// O [B, H, N, dv] with the strides of some layout, and LSE [B, H, N].
struct PartValues {
  DType dtype;
  Strides strides;
  std::vector<std::byte> o;
  std::vector<float> lse;
};

Problem problem_of(DType dtype, std::int64_t columns) {
  Problem problem;
  problem.dtype = dtype;
  problem.batch = 2;
  problem.heads_q = problem.heads_kv = 3;
  problem.seq_q = problem.seq_k = 37;
  problem.head_dim = problem.head_dim_v = columns;
  problem = contiguous(problem);
  problem.o = {37 * 3 * columns, columns, 3 * columns};  // in memory [B, N, H, dv]
  return problem;
}

std::int64_t count_rows(const Problem& p) { return p.batch * p.heads_q * p.seq_q; }

// The elements of O in the order of [B, H, N, dv].
std::vector<double> elements(const Problem& p, const Strides& strides, DType dtype, const void* o) {
  std::vector<double> result;
  for (std::int64_t row = 0; row < count_rows(p); ++row) {
    const std::int64_t start = row / p.seq_q / p.heads_q * strides.batch + row / p.seq_q % p.heads_q * strides.head +
                               row % p.seq_q * strides.row;
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      double value = 0;
      convert(static_cast<const std::byte*>(o) + static_cast<std::size_t>(start + c) * size_of(dtype), dtype, &value,
              DType::f64, 1);
      result.push_back(value);
    }
  }
  return result;
}

// LSE of a part's row: rows that no part saw, that one part saw, and that one part outweighs.
double lse_of(std::int64_t row, std::size_t part, double drawn) {
  switch (row % 5) {
    case 0:
      return kNothing;
    case 1:
      return part == 0 ? drawn : kNothing;
    case 2:
      return part == 0 ? 150 + drawn : drawn;
    default:
      return 5 * drawn;
  }
}

// is_large: values are in range and their sums are not.
PartValues random_part(const Problem& p, std::size_t index, bool is_large, std::mt19937_64& random) {
  const bool is_other = index % 3 == 2;  // of another type, and in memory [B, H, N, dv]
  PartValues part{is_other ? DType::f32 : p.dtype, is_other ? contiguous(p).o : p.o, {}, {}};
  Normal normal;
  const auto count = static_cast<std::size_t>(count_rows(p) * p.head_dim_v);
  std::vector<double> values(count);
  for (double& value : values) {
    const double drawn = normal(random);
    value = is_large ? std::ldexp(1.75 - 0.75 / (1 + drawn * drawn), 127) : drawn;
  }
  part.o.resize(count * size_of(part.dtype));
  convert(values.data(), DType::f64, part.o.data(), part.dtype, static_cast<std::int64_t>(count));
  for (std::int64_t row = 0; row < count_rows(p); ++row) {
    part.lse.push_back(static_cast<float>(lse_of(row, index, normal(random))));
  }
  return part;
}

struct Merged {
  std::vector<double> o, lse;
};

// On the CPU, into O and LSE of a type. Without LSE, which then is zeros, O is the sum of the parts.
Merged on_cpu(Problem p, const std::vector<PartValues>& parts, DType into, bool has_lse) {
  std::vector<std::vector<double>> lses;
  std::vector<Partial> partials;
  for (const PartValues& part : parts) {
    lses.emplace_back(part.lse.begin(), part.lse.end());
  }
  for (std::size_t n = 0; n < parts.size(); ++n) {
    const void* const lse = into == DType::f64 ? static_cast<const void*>(lses[n].data()) : parts[n].lse.data();
    partials.push_back({parts[n].o.data(), has_lse ? lse : nullptr, parts[n].dtype, parts[n].strides});
  }
  p.dtype = into;
  std::vector<std::byte> o(static_cast<std::size_t>(count_rows(p) * p.head_dim_v) * size_of(into));
  std::vector<std::byte> lse(static_cast<std::size_t>(count_rows(p)) * size_of(p.lse_dtype()));
  merge(p, partials, o.data(), has_lse ? lse.data() : nullptr);
  Merged result{elements(p, p.o, into, o.data()), std::vector<double>(static_cast<std::size_t>(count_rows(p)))};
  convert(lse.data(), p.lse_dtype(), result.lse.data(), DType::f64, count_rows(p));
  return result;
}

// The equations in fp32, as the device has them: O's error is what roundings cost.
std::vector<double> in_floats(const Problem& p, const std::vector<PartValues>& parts, bool has_lse) {
  const auto columns = static_cast<std::size_t>(p.head_dim_v);
  std::vector<std::vector<double>> values;
  for (const PartValues& part : parts) {
    values.push_back(elements(p, part.strides, part.dtype, part.o.data()));
  }
  std::vector<double> result(values.front().size());
  for (std::size_t n = 0; n < result.size(); ++n) {
    float largest = has_lse ? -std::numeric_limits<float>::infinity() : 0, sum = 0, o = 0;
    for (std::size_t part = 0; part < parts.size() && has_lse; ++part) {
      largest = std::max(largest, parts[part].lse[n / columns]);
    }
    for (std::size_t part = 0; part < parts.size() && std::isfinite(largest); ++part) {
      const float weight = has_lse ? std::exp(parts[part].lse[n / columns] - largest) : 1;
      sum += weight;
      o += weight * static_cast<float>(values[part][n]);
    }
    result[n] = has_lse ? (sum > 0 ? static_cast<double>(o / sum) : 0) : static_cast<double>(o);
  }
  return result;
}

// On the device, into memory of its own or into the first part's.
Merged merge_on_device(const Problem& p, const std::vector<PartValues>& parts, bool into_first, bool has_lse) {
  void* const stream = thread_stream();
  std::vector<CudaMemory> memory;
  std::vector<Partial> partials;
  const auto place = [&](const void* data, std::size_t bytes) {
    memory.emplace_back(bytes).copy_from(data, bytes, stream);
    return memory.back().data();
  };
  for (const PartValues& part : parts) {
    const void* const o = place(part.o.data(), part.o.size());
    const void* const lse = place(part.lse.data(), part.lse.size() * sizeof(float));
    partials.push_back({o, has_lse ? lse : nullptr, part.dtype, part.strides});
  }
  CudaMemory own_o(parts.front().o.size()), own_lse(parts.front().lse.size() * sizeof(float));
  own_o.fill(0xFF, stream);
  own_lse.fill(has_lse ? 0xFF : 0, stream);
  CudaMemory& o = into_first ? memory[0] : own_o;
  CudaMemory& lse = into_first ? memory[1] : own_lse;
  merge(p, partials, o.data(), has_lse ? lse.data() : nullptr, on_device());
  std::vector<std::byte> bytes(o.bytes());
  std::vector<float> lse_values(lse.bytes() / sizeof(float));
  o.copy_to(bytes.data(), bytes.size(), stream);
  lse.copy_to(lse_values.data(), lse.bytes(), stream);
  return {elements(p, p.o, p.dtype, bytes.data()), {lse_values.begin(), lse_values.end()}};
}

std::string check_merge(DType dtype, std::int64_t columns, bool is_large, bool has_lse) {
  const Problem p = problem_of(dtype, columns);
  std::mt19937_64 random(11);
  for (const std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{70}}) {
    std::vector<PartValues> parts;
    for (std::size_t n = 0; n < count; ++n) {
      parts.push_back(random_part(p, n, is_large, random));
    }
    const Merged truth = on_cpu(p, parts, DType::f64, has_lse);
    const Merged plain = on_cpu(p, parts, dtype, has_lse);
    const Merged got = merge_on_device(p, parts, false, has_lse);
    const std::string what = std::to_string(columns) + " columns, " + std::to_string(count) +
                             (is_large ? " parts of large values" : " parts") + (has_lse ? ": " : " without LSE: ");
    const double roundings = largest_error(plain.o, truth.o) + largest_error(in_floats(p, parts, has_lse), truth.o);
    std::string fault = judge(got.o, truth.o, roundings, dtype);
    if (!fault.empty()) {
      return what + "O " + fault;
    }
    fault = judge(got.lse, truth.lse, largest_error(plain.lse, truth.lse), DType::f32);
    if (!fault.empty()) {
      return what + "LSE " + fault;
    }
    const Merged again = merge_on_device(p, parts, true, has_lse);
    if (again.o != got.o || (has_lse && again.lse != got.lse)) {
      return what + "other bits where O and LSE are those of the first part";
    }
  }
  return "";
}

}  // namespace

std::string check_merge(DType dtype) {
  for (const std::int64_t columns : {41, 40}) {  // by elements, and by 16 bytes
    std::string fault = check_merge(dtype, columns, false, true) + check_merge(dtype, columns, false, false);
    if (dtype != DType::f16) {  // large values are out of its range
      fault += check_merge(dtype, columns, true, true);
    }
    if (!fault.empty()) {
      return fault;
    }
  }
  return "";
}

}  // namespace distr::test
