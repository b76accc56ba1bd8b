// SPDX-License-Identifier: Apache-2.0
#include "support/check_order.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "common/near.h"
#include "common/projection.h"
#include "reference/equations.h"

namespace distr::test {
namespace {

using reference::Matrix;

// Sorted by weights that are off by rounding only.
std::string check_weights(const std::vector<double>& weights, const std::int32_t* order) {
  if (weights.empty()) {
    return "the reference has no weights for the strategy: proves nothing";
  }
  for (std::size_t n = 1; n < weights.size(); ++n) {
    const double before = weights[static_cast<std::size_t>(order[n - 1])];
    const double after = weights[static_cast<std::size_t>(order[n])];
    if (before < after * (1 - 1e-4)) {
      return "position " + std::to_string(n) + ": weight " + std::to_string(after) + " behind " +
             std::to_string(before);
    }
  }
  return "";
}

// Sorted by hashes in which only bits whose projection is within rounding of zero may differ: columns without such
// bits must stand as the float64 hashes put them among each other.
std::string check_hashes(const Matrix& q, std::uint64_t seed, const std::int32_t* order) {
  const auto hashes = reference::hash_columns(q, seed);
  const auto d = static_cast<std::size_t>(q.columns);
  std::vector<double> sum(d * common::kHashBits);
  std::vector<double> size(d * common::kHashBits);
  for (std::int64_t n = 0; n < q.rows; ++n) {
    const auto r = common::projection_row(seed, n);
    for (std::size_t at = 0; at < sum.size(); ++at) {
      const double term = static_cast<double>(r[at % common::kHashBits]) * q.row(n)[at / common::kHashBits];
      sum[at] += term;
      size[at] += std::abs(term);
    }
  }
  std::vector<bool> doubtful(d);
  for (std::size_t at = 0; at < sum.size(); ++at) {
    if (std::abs(sum[at]) <= 0x1p-20 * size[at]) {
      doubtful[at / common::kHashBits] = true;
    }
  }
  std::vector<std::size_t> sure;
  std::copy_if(order, order + d, std::back_inserter(sure),
               [&](std::int32_t c) { return !doubtful[static_cast<std::size_t>(c)]; });
  if (sure.size() + 1 < d * 9 / 10) {
    return std::to_string(d - sure.size()) + " of " + std::to_string(d) + " columns are in doubt: proves nothing";
  }
  for (std::size_t n = 1; n < sure.size(); ++n) {
    if (std::pair(hashes[sure[n - 1]], sure[n - 1]) >= std::pair(hashes[sure[n]], sure[n])) {
      return "column " + std::to_string(sure[n]) + " (hash " + std::to_string(hashes[sure[n]]) + ") stands behind " +
             std::to_string(sure[n - 1]) + " (hash " + std::to_string(hashes[sure[n - 1]]) + ")";
    }
  }
  return "";
}

std::string check_row(const Instance& instance, std::int64_t head, std::int64_t block, const std::int32_t* order) {
  const Problem& p = instance.test_case.problem;
  const Grouping& g = instance.test_case.grouping;
  std::vector<std::int32_t> sorted(order, order + p.head_dim);
  std::sort(sorted.begin(), sorted.end());
  for (std::int64_t c = 0; c < p.head_dim; ++c) {
    if (sorted[static_cast<std::size_t>(c)] != c) {
      return "no permutation: column " + std::to_string(c) + " is missing";
    }
  }
  if (common::is_exact_block(g, block)) {
    return std::is_sorted(order, order + p.head_dim) ? "" : "not the identity";
  }
  const std::int64_t b = head / p.heads_q;
  const std::int64_t h = head % p.heads_q;
  const std::int64_t from = common::order_block(g, block);
  const Matrix q = reference::load_rows(instance.q_data(), p.dtype, p.q, b, h, from * g.block,
                                        common::block_rows(p, g, from), p.head_dim);
  if (g.strategy == Strategy::lsh) {
    return check_hashes(q, g.seed, order);
  }
  const Matrix k =
      reference::load_rows(instance.k_data(), p.dtype, p.k, b, h * p.heads_kv / p.heads_q, 0, p.seq_k, p.head_dim);
  return check_weights(reference::weights(g.strategy, q, k, common::order_keys(p, g, block)), order);
}

// Means that are off by rounding only.
std::string check_key_means(const Instance& instance, const float* key_means) {
  constexpr double kRounding = 0x1p-20;  // of sums in fp32, relative to the largest key
  const Problem& p = instance.test_case.problem;
  const Grouping& g = instance.test_case.grouping;
  for (std::int64_t head = 0; head < p.batch * p.heads_kv; ++head) {
    const std::int64_t b = head / p.heads_kv;
    const std::int64_t h_kv = head % p.heads_kv;
    const Matrix k = reference::load_rows(instance.k_data(), p.dtype, p.k, b, h_kv, 0, p.seq_k, p.head_dim);
    for (std::int64_t block = 0; block < common::num_key_means(p, g); ++block) {
      const std::int64_t keys = common::order_keys(p, g, block);
      for (std::int64_t c = 0; c < p.head_dim; ++c) {
        double largest = 0;
        for (std::int64_t j = 0; j < keys; ++j) {
          largest = std::max(largest, std::abs(k.row(j)[c]));
        }
        const double wanted = reference::key_mean(k, keys, c);
        const double mean = static_cast<double>(key_means[common::key_means_at(p, g, b, h_kv, block) + c]);
        if (!(std::abs(mean - wanted) <= kRounding * largest)) {
          return "head " + std::to_string(head) + ", block " + std::to_string(block) + ", column " + std::to_string(c) +
                 ": the mean of the keys is " + std::to_string(mean) + ", expected " + std::to_string(wanted);
        }
      }
    }
  }
  return "";
}

}  // namespace

std::string check_order(const Instance& instance, const std::int32_t* order) {
  const Problem& p = instance.test_case.problem;
  const std::int64_t blocks = common::num_blocks(p, instance.test_case.grouping);
  for (std::int64_t row = 0; row < p.batch * p.heads_q * blocks; ++row) {
    const std::string fault = check_row(instance, row / blocks, row % blocks, order + row * p.head_dim);
    if (!fault.empty()) {
      return "head " + std::to_string(row / blocks) + ", block " + std::to_string(row % blocks) + ": " + fault;
    }
  }
  return "";
}

std::string check_grouping(const Instance& instance, const std::vector<std::int32_t>& order,
                           const std::vector<float>& key_means) {
  std::string fault;
  if (!makes_order(instance.test_case.grouping)) {
    fault = std::count(order.begin(), order.end(), -1) == std::ssize(order) ? "" : "wrote the caller's order";
  } else if (!order.empty()) {
    fault = check_order(instance, order.data());
  }
  return fault.empty() && !key_means.empty() ? check_key_means(instance, key_means.data()) : fault;
}

}  // namespace distr::test
