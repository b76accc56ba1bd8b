// SPDX-License-Identifier: Apache-2.0
// Parts of a longer call, each some rows and some keys of it: merged, they are the call, in its blocks and near keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/cases.h"
#include "support/failure.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

constexpr std::int64_t kRows = 570;  // in parts from each of
constexpr std::array kCuts{std::int64_t{0}, std::int64_t{256}, std::int64_t{512}, kRows};
constexpr std::int64_t kColumns = 16;  // d and dv

Problem problem_of(const Instance& instance, std::int64_t rows, std::int64_t keys, bool causal) {
  Problem problem = instance.test_case.problem;
  problem.seq_q = rows;
  problem.seq_k = keys;
  problem.causal = causal ? Causal::top_left : Causal::none;
  return contiguous(problem);
}

const void* at(const Buffer& buffer, std::int64_t element) {
  return static_cast<const std::byte*>(buffer.data()) + element * static_cast<std::int64_t>(size_of(buffer.dtype()));
}

// The largest difference, of O and LSE, between the whole call and the merged parts of some rows.
double difference(Instance& instance, std::size_t n) {
  const Case& whole = instance.test_case;
  const bool causal = whole.problem.causal != Causal::none;
  const std::int64_t first = kCuts[n], rows = kCuts[n + 1] - first;
  const std::int64_t block = first / whole.grouping.block;
  const bool has_means_of_blocks = whole.grouping.order_from == OrderFrom::previous && !instance.key_means.empty();
  std::vector<Buffer> outs, lses;
  for (std::size_t m = 0; m + 1 < kCuts.size() && (!causal || m <= n); ++m) {
    const std::int64_t first_key = kCuts[m], keys = kCuts[m + 1] - first_key;
    const Problem problem = problem_of(instance, rows, keys, causal && m == n);
    Grouping grouping = whole.grouping;
    grouping.part = Part{first, first_key};
    outs.emplace_back(rows * kColumns, problem.dtype);
    lses.emplace_back(rows, problem.lse_dtype());
    forward(problem, grouping,
            {.q = at(instance.q, first * kColumns),
             .k = at(instance.k, first_key * kColumns),
             .v = at(instance.v, first_key * kColumns),
             .order = instance.order.data() + block * kColumns,
             .o = outs.back().data(),
             .lse = lses.back().data(),
             .key_means = instance.key_means.data() + (has_means_of_blocks ? block * kColumns : 0)});
  }
  std::vector<Partial> parts;
  for (std::size_t m = 0; m < outs.size(); ++m) {
    parts.push_back({outs[m].data(), lses[m].data()});
  }
  merge(problem_of(instance, rows, rows, false), parts, outs[0].data(), lses[0].data());
  double largest = 0;
  for (std::int64_t i = 0; i < rows * kColumns; ++i) {
    largest = std::max(largest, std::abs(outs[0].at(i) - instance.o.at(first * kColumns + i)));
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    largest = std::max(largest, std::abs(lses[0].at(i) - instance.lse.at(first + i)));
  }
  return largest;
}

TEST(Parts, MergedAreTheWhole) {
  using enum Strategy;
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const Strategy strategy : {exact, lsh, energy, given}) {
      for (const std::int64_t block : {64, 256}) {
        for (const OrderFrom from : {OrderFrom::own, OrderFrom::previous}) {
          for (const int near : {0, 1, 2}) {  // none, a window, sinks
            Grouping grouping{
                .strategy = strategy, .group_size = strategy == exact ? 1 : 2, .block = block, .order_from = from};
            if (near == 1) grouping.window = 100;
            if (near == 2) grouping.sinks = 200;
            const Causal causal = from == OrderFrom::previous ? Causal::top_left : Causal::none;
            Instance instance(test::with_dtype(test::square(kRows, kColumns, causal, grouping), dtype));
            forward(instance.test_case.problem, grouping, instance.forward());
            for (std::size_t n = 0; n + 1 < kCuts.size(); ++n) {
              EXPECT_LT(difference(instance, n), dtype == DType::f64 ? 1e-12 : 1e-5)
                  << test::name_of(dtype) << ", " << traits(strategy).name << ", block " << block << ", near " << near
                  << (from == OrderFrom::own ? ", own" : ", previous") << ", rows from " << kCuts[n];
            }
          }
        }
      }
    }
  }
}

TEST(Parts, HaveNoOrdersOfTheirOwn) {
  const Grouping grouping{.strategy = Strategy::lsh, .group_size = 2, .block = 64, .part = Part{64, 0}};
  const Case part = test::square(100, kColumns, Causal::none, grouping);
  const auto [status, message] = test::failure([&] { (void)plan(Operation::grouping, part.problem, grouping); });
  EXPECT_EQ(status, Status::unsupported);
  EXPECT_NE(message.find("has no orders of a part"), std::string::npos) << message;
}

}  // namespace
}  // namespace distr
