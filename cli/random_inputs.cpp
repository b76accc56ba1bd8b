// SPDX-License-Identifier: Apache-2.0
#include "random_inputs.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <string>

#include "distr/error.h"
#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

std::vector<std::byte> random_tensor(std::int64_t count, DType dtype, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  convert(values.data(), DType::f32, bytes.data(), dtype, count);
  return bytes;
}

// The flags that a problem of random values is made of.
std::string flags_of(const Problem& problem) {
  return "--batch " + std::to_string(problem.batch) + ", --heads " + std::to_string(problem.heads_q) + ", --seq " +
         std::to_string(problem.seq_q) + ", --head-dim " + std::to_string(problem.head_dim);
}

// Q, K, V and O, and one of them as fp32, which the values are drawn in.
double bytes_of(const Problem& problem) {
  const double columns = static_cast<double>(problem.head_dim + problem.head_dim_v);
  const double q = static_cast<double>(problem.batch * problem.heads_q) * static_cast<double>(problem.seq_q);
  const double k = static_cast<double>(problem.batch * problem.heads_kv) * static_cast<double>(problem.seq_k);
  return (q + k) * columns * static_cast<double>(size_of(problem.dtype)) +
         q * static_cast<double>(problem.head_dim) * static_cast<double>(sizeof(float));
}

}  // namespace

void validate_random(const Problem& problem) {
  try {
    validate(problem);
  } catch (const Error& error) {
    throw InputError(flags_of(problem) + ": " + error.what());
  }
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (bytes_of(problem) <= memory) return;
  throw Error(Status::out_of_memory, flags_of(problem) + ": Q, K, V and O of " +
                                         significant(bytes_of(problem) / 1e9, 3) + " GB do not fit into memory");
}

Inputs random_inputs(const Problem& problem, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Inputs inputs;
  inputs.problem = problem;
  inputs.file_type = problem.dtype;
  inputs.rank = 4;
  const std::int64_t q_shape[] = {problem.batch, problem.heads_q, problem.seq_q, problem.head_dim};
  const std::int64_t k_shape[] = {problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim};
  const std::int64_t v_shape[] = {problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim_v};
  inputs.q = random_tensor(count_of(q_shape), problem.dtype, random);
  inputs.k = random_tensor(count_of(k_shape), problem.dtype, random);
  inputs.v = random_tensor(count_of(v_shape), problem.dtype, random);
  return inputs;
}

namespace {

// Of a query and a key that it sees; as many keys as queries.
double visible_pairs(const Problem& problem) {
  const std::int64_t length = problem.seq_q;
  const std::int64_t left = std::min(problem.window_left.value_or(length), length);
  const std::int64_t right =
      problem.causal != Causal::none ? 0 : std::min(problem.window_right.value_or(length), length);
  double pairs = 0;
  for (std::int64_t i = 0; i < length; ++i) {
    pairs += static_cast<double>(std::min(i, left) + 1 + std::min(length - 1 - i, right));
  }
  return pairs;
}

}  // namespace

double exact_operations(const Problem& problem, Work work) {
  const double pairs = visible_pairs(problem);
  const auto d = static_cast<double>(problem.head_dim);
  const auto dv = static_cast<double>(problem.head_dim_v);
  const double forward = d + dv;
  const double backward = 3 * d + 2 * dv;
  const double per_pair = work == Work::forward            ? forward
                          : work == Work::backward         ? backward
                          : work == Work::forward_backward ? forward + backward
                                                           : 0;
  return 2 * static_cast<double>(problem.batch * problem.heads_q) * pairs * per_pair;
}

}  // namespace distr::cli
