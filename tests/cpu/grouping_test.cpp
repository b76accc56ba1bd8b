// SPDX-License-Identifier: Apache-2.0
// The CPU's orders against the reference's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "common/block.h"
#include "common/projection.h"
#include "reference/equations.h"
#include "support/cases.h"

namespace distr {
namespace {

using reference::Matrix;
using test::Case;
using test::Instance;

// What decided the order of one block, in float64.
struct Block {
  Matrix q;
  Matrix k;
  std::int64_t keys;
};

Block block_of(const Instance& instance, std::int64_t head, std::int64_t block) {
  const Problem& p = instance.test_case.problem;
  const Grouping& g = instance.test_case.grouping;
  const std::int64_t b = head / p.heads_q;
  const std::int64_t h = head % p.heads_q;
  const std::int64_t from = common::order_block(g, block);
  return {reference::load_rows(instance.q_data(), p.dtype, p.q, b, h, from * g.block, common::block_rows(p, g, from),
                               p.head_dim),
          reference::load_rows(instance.k_data(), p.dtype, p.k, b, h * p.heads_kv / p.heads_q, 0, p.seq_k, p.head_dim),
          common::order_keys(p, g, block)};
}

// The order is right if it is sorted by energies that are off by rounding only.
void expect_sorted_by_energy(const Block& block, const std::int32_t* order) {
  const auto energy = reference::energies(block.q, block.k, block.keys);
  for (std::size_t n = 1; n < energy.size(); ++n) {
    const double before = energy[static_cast<std::size_t>(order[n - 1])];
    const double after = energy[static_cast<std::size_t>(order[n])];
    ASSERT_GE(before, after * (1 - 1e-4)) << "position " << n;
  }
}

// The order is right if it is sorted by hashes in which only bits whose projection is within rounding of zero may
// differ: columns without such bits must stand exactly where the float64 hashes put them among each other.
void expect_sorted_by_hash(const Block& block, std::uint64_t seed, const std::int32_t* order) {
  const auto hashes = reference::hash_columns(block.q, seed);
  const auto d = static_cast<std::size_t>(block.q.columns);
  std::vector<std::array<float, common::kHashBits>> projection;
  for (std::int64_t n = 0; n < block.q.rows; ++n) {
    projection.push_back(common::projection_row(seed, n));
  }
  std::vector<bool> doubtful(d);
  for (std::size_t c = 0; c < d; ++c) {
    for (std::size_t t = 0; t < common::kHashBits; ++t) {
      double sum = 0;
      double size = 0;
      for (std::int64_t n = 0; n < block.q.rows; ++n) {
        const double term = static_cast<double>(projection[static_cast<std::size_t>(n)][t]) * block.q.row(n)[c];
        sum += term;
        size += std::abs(term);
      }
      doubtful[c] = doubtful[c] || std::abs(sum) <= 0x1p-20 * size;
    }
  }
  std::vector<std::size_t> sure;
  std::copy_if(order, order + d, std::back_inserter(sure),
               [&](std::int32_t c) { return !doubtful[static_cast<std::size_t>(c)]; });
  EXPECT_GE(sure.size() + 1, d * 9 / 10);
  for (std::size_t n = 1; n < sure.size(); ++n) {
    ASSERT_TRUE(std::pair(hashes[sure[n - 1]], sure[n - 1]) < std::pair(hashes[sure[n]], sure[n])) << "position " << n;
  }
}

TEST(CpuGrouping, IsTheReferencesUpToRounding) {
  for (const Case& test_case : test::cases()) {
    if (is_exact(test_case.grouping) || !test::makes_order(test_case.grouping)) {
      continue;
    }
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      SCOPED_TRACE(test_case.name + ", " + test::name_of(dtype));
      Instance instance(test::with_dtype(test_case, dtype));
      const Problem& p = instance.test_case.problem;
      const Grouping& g = test_case.grouping;
      std::vector<std::int32_t> order(instance.order.size(), -1);
      make_grouping(p, g, {instance.q_data(), instance.k_data(), order.data()});
      const std::int64_t blocks = common::num_blocks(p, g);
      for (std::int64_t row = 0; row < p.batch * p.heads_q * blocks; ++row) {
        const std::int32_t* of_block = order.data() + row * p.head_dim;
        std::vector<std::int32_t> sorted(of_block, of_block + p.head_dim);
        std::sort(sorted.begin(), sorted.end());
        for (std::int64_t c = 0; c < p.head_dim; ++c) {
          ASSERT_EQ(sorted[static_cast<std::size_t>(c)], c) << "no permutation";
        }
        if (common::is_exact_block(g, row % blocks)) {
          EXPECT_TRUE(std::is_sorted(of_block, of_block + p.head_dim));
        } else if (g.strategy == Strategy::energy) {
          expect_sorted_by_energy(block_of(instance, row / blocks, row % blocks), of_block);
        } else {
          expect_sorted_by_hash(block_of(instance, row / blocks, row % blocks), g.seed, of_block);
        }
      }
    }
  }
}

TEST(CpuGrouping, HasTheSameBitsForAnyNumberOfThreads) {
  for (const Case& test_case : test::cases()) {
    if (!test::makes_order(test_case.grouping)) {
      continue;
    }
    const Instance instance(test::with_dtype(test_case, DType::f32));
    std::vector<std::int32_t> one(instance.order.size());
    std::vector<std::int32_t> three(instance.order.size());
    Execution execution;
    execution.threads = 1;
    make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), one.data()}, execution);
    execution.threads = 3;
    make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), three.data()},
                  execution);
    EXPECT_EQ(one, three) << test_case.name;
  }
}

// A large mean must not drown the spread around it: the sums are taken about the mean.
TEST(CpuGrouping, EnergySurvivesALargeMean) {
  Case test_case;
  test_case.name = "large mean";
  test_case.problem.seq_q = 16;
  test_case.problem.seq_k = 1000;
  test_case.problem.head_dim = test_case.problem.head_dim_v = 8;
  test_case.problem = contiguous(test_case.problem);
  test_case.grouping.strategy = Strategy::energy;
  Instance instance(test_case);
  for (std::int64_t n = 0; n < instance.k.count(); ++n) {
    const auto column = static_cast<double>(n % 8);
    instance.k.set(n, 1000 + instance.k.at(n) * (1 + column));
  }
  for (std::int64_t n = 0; n < instance.q.count(); ++n) {
    instance.q.set(n, 1);
  }
  make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), instance.order.data()});
  EXPECT_EQ(instance.order, (std::vector<std::int32_t>{7, 6, 5, 4, 3, 2, 1, 0}));
}

TEST(CpuGrouping, NanAndInfiniteEnergiesComeFirst) {
  Case test_case;
  test_case.name = "not finite";
  test_case.problem.seq_q = test_case.problem.seq_k = 20;
  test_case.problem.head_dim = test_case.problem.head_dim_v = 6;
  test_case.problem = contiguous(test_case.problem);
  test_case.grouping.strategy = Strategy::energy;
  Instance instance(test_case);
  instance.q.set(6 + 3, std::nan(""));
  instance.k.set(12 + 5, INFINITY);
  make_grouping(test_case.problem, test_case.grouping, {instance.q_data(), instance.k_data(), instance.order.data()});
  EXPECT_EQ(instance.order[0], 3);
  EXPECT_EQ(instance.order[1], 5);
}

}  // namespace
}  // namespace distr
