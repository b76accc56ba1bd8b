// SPDX-License-Identifier: Apache-2.0
// Orders and groups, equation by equation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/projection.h"
#include "reference/equations.h"
#include "support/cases.h"

namespace distr::reference {
namespace {

using Order = std::vector<std::int32_t>;

Matrix matrix(std::int64_t rows, std::int64_t columns, const std::vector<double>& values) {
  Matrix result(rows, columns);
  result.values = values;
  return result;
}

Order energy_order(const Matrix& q_block, const Matrix& k, std::int64_t keys) {
  return order_columns({.strategy = Strategy::energy}, q_block, k, keys);
}

TEST(HashColumns, IsTheRankOfTheBitsOfOneRow) {
  // One row: bit t of a positive column is [R[0, t] > 0], of a negative one [R[0, t] < 0].
  const auto r = common::projection_row(5, 0);
  std::uint32_t positive = 0;
  for (std::size_t t = 0; t < r.size(); ++t) {
    positive |= static_cast<std::uint32_t>(r[t] > 0) << t;
  }
  const auto hashes = hash_columns(matrix(1, 2, {2.0, -0.5}), 5);
  EXPECT_EQ(hashes[0], common::gray_rank(positive));
  EXPECT_EQ(hashes[1], common::gray_rank(0xFFFFU & ~positive));
}

TEST(HashColumns, ZeroMinusZeroAndNanAreNotPositive) {
  const auto hashes = hash_columns(matrix(1, 3, {0.0, -0.0, std::nan("")}), 1);
  EXPECT_EQ(hashes, (std::vector<std::uint32_t>{0, 0, 0}));
}

TEST(HashColumns, DependsOnTheSeedAndOnTheRow) {
  const Matrix two_rows = matrix(2, 1, {1, -1});
  EXPECT_NE(hash_columns(two_rows, 1), hash_columns(two_rows, 2));
  EXPECT_NE(hash_columns(two_rows, 1), hash_columns(matrix(2, 1, {-1, 1}), 1));
}

TEST(LshOrder, SortsByHashThenColumn) {
  // Columns 0 and 3 are alike, so are 1 and 4; equal hashes keep their order and stand side by side.
  const Matrix q = matrix(2, 5, {1, -1, 0.3, 1, -1, 2, 0.5, 0.3, 2, 0.5});
  const auto hashes = hash_columns(q, 3);
  const Order order = order_columns({.strategy = Strategy::lsh, .seed = 3}, q, Matrix(0, 5), 0);
  for (std::size_t n = 1; n < order.size(); ++n) {
    const auto before = static_cast<std::size_t>(order[n - 1]);
    const auto after = static_cast<std::size_t>(order[n]);
    EXPECT_TRUE(hashes[before] < hashes[after] || (hashes[before] == hashes[after] && before < after));
  }
  const auto position = [&](std::int32_t column) {
    return std::find(order.begin(), order.end(), column) - order.begin();
  };
  EXPECT_EQ(position(3), position(0) + 1);
  EXPECT_EQ(position(4), position(1) + 1);
}

TEST(Energies, AreQSquaresTimesKSpread) {
  const Matrix q = matrix(2, 2, {1, 2, 3, 4});
  const Matrix k = matrix(3, 2, {0, 1, 3, 1, 6, 4});
  // Column 0: (1 + 9) * (9 + 0 + 9); column 1: (4 + 16) * (1 + 1 + 4).
  EXPECT_EQ(energies(q, k, 3), (std::vector<double>{180, 120}));
  EXPECT_EQ(energies(q, k, 2), (std::vector<double>{10 * 4.5, 0}));
  EXPECT_EQ(energies(q, k, 0), (std::vector<double>{0, 0}));
}

TEST(EnergyOrder, DescendsWithTiesToTheLowerColumnAndNanFirst) {
  const Matrix k = matrix(2, 5, {0, 0, 0, 0, 0, 1, 1, 1, 1, 1});
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(energy_order(matrix(1, 5, {1, 3, 1, 3, 2}), k, 2), (Order{1, 3, 4, 0, 2}));
  EXPECT_EQ(energy_order(matrix(1, 5, {1, 3, std::nan(""), 3, infinity}), k, 2), (Order{2, 4, 1, 3, 0}));
  EXPECT_EQ(energy_order(matrix(1, 5, {5, 4, 3, 2, 1}), k, 0), (Order{0, 1, 2, 3, 4}));
}

const Order kOrder{3, 0, 4, 1, 2};

TEST(Estimate, SamplesTheFirstColumnOrTakesTheMean) {
  const common::Groups groups{kOrder.data(), 5, 3, 2};
  const Matrix q = matrix(1, 5, {10, 20, 30, 40, 50});
  EXPECT_EQ(estimate(q, groups, Estimator::sample).values, (std::vector<double>{40, 50, 30}));
  EXPECT_EQ(estimate(q, groups, Estimator::mean).values, (std::vector<double>{25, 35, 30}));
}

TEST(Fuse, SumsAGroupsColumns) {
  const common::Groups groups{kOrder.data(), 5, 3, 2};
  EXPECT_EQ(fuse(matrix(1, 5, {10, 20, 30, 40, 50}), groups).values, (std::vector<double>{50, 70, 30}));
}

TEST(Fuse, KeepsTheFirstColumnsForEnergy) {
  const common::Groups groups{kOrder.data(), 5, 3, 1};
  EXPECT_EQ(fuse(matrix(1, 5, {10, 20, 30, 40, 50}), groups).values, (std::vector<double>{40, 10, 50}));
}

std::vector<std::int32_t> identity(std::int64_t d) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(d));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

Order order_of(const test::Instance& instance, std::int64_t head, std::int64_t block) {
  const auto shape = order_shape(instance.test_case.problem, instance.test_case.grouping);
  const auto begin = instance.order.begin() + (head * shape[2] + block) * shape[3];
  return {begin, begin + shape[3]};
}

test::Case find(const std::string& name) { return test::with_dtype(test::find(name), DType::f64); }

TEST(MakeGrouping, WritesTheIdentityWhereAttentionIsExact) {
  const test::Instance exact(find("GQA"));
  EXPECT_EQ(order_of(exact, 3, 0), identity(16));
  const test::Instance group_size_1(find("lsh, G 1"));
  EXPECT_EQ(order_of(group_size_1, 0, 0), identity(23));
  const test::Instance previous(find("lsh, previous"));
  EXPECT_EQ(order_of(previous, 1, 0), identity(32));
  EXPECT_NE(order_of(previous, 1, 1), identity(32));
}

TEST(MakeGrouping, PreviousTakesTheOrderOfTheBlockBefore) {
  test::Case own = find("lsh, previous");
  const test::Instance previous(own);
  own.grouping.order_from = OrderFrom::own;
  const test::Instance by_own(own);
  for (std::int64_t block = 1; block < 4; ++block) {
    EXPECT_EQ(order_of(previous, 1, block), order_of(by_own, 1, block - 1));
  }
}

// Energies of `previous` use the keys j < b l + c, c = Nk - Nq for bottom-right and else 0.
TEST(MakeGrouping, PreviousEnergiesUseTheKeysBeforeTheBlock) {
  for (const char* name : {"energy, previous", "energy, previous, more keys", "energy, previous, more queries",
                           "energy, previous, not causal"}) {
    SCOPED_TRACE(name);
    const test::Instance instance(find(name));
    const Problem& p = instance.test_case.problem;
    const std::int64_t l = instance.test_case.grouping.block;
    const Matrix k = load_rows(instance.k_data(), p.dtype, p.k, 0, 0, 0, p.seq_k, p.head_dim);
    for (std::int64_t block = 1; block < (p.seq_q + l - 1) / l; ++block) {
      const Matrix q = load_rows(instance.q_data(), p.dtype, p.q, 0, 0, (block - 1) * l, l, p.head_dim);
      const std::int64_t c = p.causal == Causal::bottom_right ? p.seq_k - p.seq_q : 0;
      const std::int64_t keys = std::clamp<std::int64_t>(block * l + c, 0, p.seq_k);
      EXPECT_EQ(order_of(instance, 0, block), energy_order(q, k, keys)) << "block " << block;
    }
  }
}

TEST(MakeGrouping, GqaReadsTheKvHeadOfTheQueryHead) {
  const test::Instance instance(find("energy, previous"));
  const Problem& p = instance.test_case.problem;
  const Matrix q = load_rows(instance.q_data(), p.dtype, p.q, 0, 3, 0, 64, p.head_dim);
  const Matrix k = load_rows(instance.k_data(), p.dtype, p.k, 0, 1, 0, 64, p.head_dim);
  EXPECT_EQ(order_of(instance, 3, 1), energy_order(q, k, 64));
}

}  // namespace
}  // namespace distr::reference
