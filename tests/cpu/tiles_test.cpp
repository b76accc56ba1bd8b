// SPDX-License-Identifier: Apache-2.0
// Products in AMX's tile registers: their blocks and edges, and all of a forward and a backward by them, emulated.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "common/sequence.h"
#include "cpu/emulated_tiles.h"
#include "cpu/entries.h"
#include "support/oracle.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tiles_test.cpp"
#include <hwy/foreach_target.h>
// After foreach_target:
#include <hwy/highway.h>

#include "cpu/backward_tasks-inl.h"
#include "cpu/forward_tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

#if DISTR_CPU_HAS_PAIRS
// The largest difference from a plain product, NaN where one is NaN.
template <class Tiles>
double product_error(std::int64_t m, std::int64_t n, std::int64_t k, bool a_by_columns, bool accumulate) {
  constexpr float kUntouched = 12345;
  std::mt19937 random(1);
  const auto pair = [&] {
    const auto value = [&] { return common::from_float<common::BFloat16>(static_cast<float>(random() % 17) - 8); };
    return Pair{{value(), value()}};
  };
  const Pair nan{{common::from_float<common::BFloat16>(std::numeric_limits<float>::quiet_NaN()),
                  common::from_float<common::BFloat16>(std::numeric_limits<float>::quiet_NaN())}};
  // What is behind the operands is NaN, and whole vectors behind a column of A may be read.
  const std::int64_t a_stride = a_by_columns ? 1 : k + 3, a_step = a_by_columns ? round_up(m, 16) : 1;
  const std::int64_t b_stride = n + 16, c_stride = n + 5;
  std::vector<Pair> a(static_cast<std::size_t>(m * (k + 3) + (k + 1) * round_up(m, 16)), nan);
  std::vector<Pair> b(static_cast<std::size_t>((k + 1) * b_stride), nan);
  std::vector<float> c(static_cast<std::size_t>((m + 1) * c_stride), kUntouched);
  std::vector<double> expected(c.begin(), c.end());
  std::vector<const Pair*> b_rows;
  for (std::int64_t p = 0; p < k; ++p) {
    b_rows.push_back(b.data() + p * b_stride);
    std::generate_n(b.data() + p * b_stride, n, pair);
    for (std::int64_t i = 0; i < m; ++i) {
      a[static_cast<std::size_t>(i * a_stride + p * a_step)] = pair();
    }
  }
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      const auto at = static_cast<std::size_t>(i * c_stride + j);
      c[at] = static_cast<float>(random() % 100);
      expected[at] = accumulate ? c[at] : 0;
      for (std::int64_t p = 0; p < k; ++p) {
        const Pair x = a[static_cast<std::size_t>(i * a_stride + p * a_step)],
                   y = b_rows[static_cast<std::size_t>(p)][j];
        for (std::size_t half = 0; half < 2; ++half) {
          expected[at] += static_cast<double>(common::to_float(x.halves[half]) * common::to_float(y.halves[half]));
        }
      }
    }
  }
  {
    const typename TileArithmetic<Tiles>::Session session;
    TileArithmetic<Tiles>::multiply(
        {a.data(), a_stride, a_step, b_rows.data(), c.data(), c_stride, m, n, k, accumulate});
  }
  double error = 0;
  for (std::size_t at = 0; at < c.size(); ++at) {
    const double difference = std::abs(static_cast<double>(c[at]) - expected[at]);
    error = difference <= error ? error : difference;
  }
  return error;
}
#endif

// Of m, n, k and how A lies, by emulated registers or the CPU's.
double product_error([[maybe_unused]] bool emulated, [[maybe_unused]] std::int64_t m, [[maybe_unused]] std::int64_t n,
                     [[maybe_unused]] std::int64_t k, [[maybe_unused]] bool a_by_columns,
                     [[maybe_unused]] bool accumulate) {
#if DISTR_CPU_HAS_PAIRS
  return emulated ? product_error<test::EmulatedTiles>(m, n, k, a_by_columns, accumulate)
                  : product_error<AmxTiles>(m, n, k, a_by_columns, accumulate);
#else
  return 0;
#endif
}

void forward_in_tiles([[maybe_unused]] const Problem& problem, [[maybe_unused]] const Grouping& grouping,
                      [[maybe_unused]] const ForwardTensors& tensors, [[maybe_unused]] const Execution& execution) {
#if DISTR_CPU_HAS_PAIRS
  using Arithmetic = TileArithmetic<test::EmulatedTiles>;
  const ForwardTiling tiling(problem, grouping, execution.tile_rows);
  forward_of<common::BFloat16, Arithmetic>(problem, grouping, tiling, tensors, execution);
#endif
}

void backward_in_tiles([[maybe_unused]] const Problem& problem, [[maybe_unused]] const Grouping& grouping,
                       [[maybe_unused]] const BackwardTensors& tensors, [[maybe_unused]] const Execution& execution) {
#if DISTR_CPU_HAS_PAIRS
  using Arithmetic = TileArithmetic<test::EmulatedTiles>;
  for (std::int64_t b = 0; b < (common::has_lengths(problem) ? problem.batch : 1); ++b) {
    common::with_sequence(
        problem, tensors, b, [&](const Problem& own, const BackwardTensors& from, std::int64_t /*b*/) {
          backward_of<common::BFloat16, Arithmetic>(own, grouping, BackwardTiling(own, grouping), from, execution);
        });
  }
#endif
}

bool rounds_to_bf16() {
#if DISTR_CPU_HAS_PAIRS
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace distr {
namespace cpu {
HWY_EXPORT(product_error);
HWY_EXPORT(forward_in_tiles);
HWY_EXPORT(backward_in_tiles);
HWY_EXPORT(rounds_to_bf16);
}  // namespace cpu

namespace {

using test::Buffer;
using test::Case;
using test::Instance;

// Of a call that names no number.
constexpr int kThreads = 2;
int threads_of(const Execution& execution) { return execution.threads == 0 ? kThreads : execution.threads; }

// What the workspace held before must not matter.
template <class Tensors>
void run(void (*operation)(const Problem&, const Grouping&, const Tensors&, const Execution&), const Problem& problem,
         const Grouping& grouping, const Tensors& tensors, int threads, std::int64_t tile_rows, std::int64_t floats) {
  std::vector<float> workspace(static_cast<std::size_t>(floats) + 16, std::numeric_limits<float>::quiet_NaN());
  Execution execution;
  execution.threads = threads;
  execution.tile_rows = tile_rows;
  execution.workspace = workspace.data();
  operation(problem, grouping, tensors, execution);
}

void forward_in_tiles(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                      const Execution& execution) {
  const int threads = threads_of(execution);
  const std::int64_t rows = execution.tile_rows == 0 ? cpu::kTileQueries : execution.tile_rows;
  const cpu::ForwardTiling tiling(problem, grouping, rows);
  const cpu::ForwardScratch scratch(problem, grouping, cpu::Products::of_pairs_in_tiles);
  run(HWY_DYNAMIC_DISPATCH(cpu::forward_in_tiles), problem, grouping, tensors, threads, rows,
      threads * scratch.total + tiling.num_tasks() * tiling.partial_floats());
}

void backward_in_tiles(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                       const Execution& execution) {
  const int threads = threads_of(execution);
  const Problem longest = common::longest_sequence(problem);
  const cpu::BackwardTiling tiling(longest, grouping);
  const cpu::BackwardScratch scratch(problem, grouping, cpu::Products::of_pairs_in_tiles);
  run(HWY_DYNAMIC_DISPATCH(cpu::backward_in_tiles), problem, grouping, tensors, threads, cpu::kTileQueries,
      threads * scratch.total + tiling.shared_floats());
}

class CpuTiles : public testing::Test {
 protected:
  void SetUp() override {
    if (!HWY_DYNAMIC_DISPATCH(cpu::rounds_to_bf16)()) {
      GTEST_SKIP() << "the CPU does not round to bf16";
    }
  }
};

void check_products(bool emulated) {
  for (const std::int64_t m : {1, 2, 15, 16, 17, 24, 31, 32, 33, 64, 125}) {
    for (const std::int64_t n : {16, 32, 48, 128}) {
      for (const std::int64_t k : {1, 2, 15, 16, 17, 32, 40, 64, 130}) {
        for (const bool a_by_columns : {false, true}) {
          for (const bool accumulate : {false, true}) {
            EXPECT_EQ(HWY_DYNAMIC_DISPATCH(cpu::product_error)(emulated, m, n, k, a_by_columns, accumulate), 0)
                << "m " << m << ", n " << n << ", k " << k << (a_by_columns ? ", A by columns" : "")
                << (accumulate ? ", C += A B" : "");
          }
        }
      }
    }
  }
}

TEST_F(CpuTiles, MultiplyWhatAPlainProductDoes) { check_products(true); }

TEST_F(CpuTiles, MultiplyWhatAPlainProductDoesOnTheCpu) {
  if (cpu::products_of_bf16() != cpu::Products::of_pairs_in_tiles) {
    GTEST_SKIP() << "the CPU has no tile registers";
  }
  check_products(false);
}

void check(const Case& test_case, const std::string& what) {
  Instance instance(test::with_dtype(test_case, DType::bf16));
  EXPECT_EQ(test::check_forward(forward_in_tiles, instance), "") << what;
  EXPECT_EQ(test::check_backward(backward_in_tiles, instance), "") << what;
}

TEST_F(CpuTiles, ComputeEveryCase) {
  for (const Case& test_case : test::cases()) {
    check(test_case, test_case.name);
  }
}

TEST_F(CpuTiles, ComputeNearKeys) {
  for (const Case& test_case : test::near_cases()) {
    Instance instance(test::with_dtype(test_case, DType::bf16));
    EXPECT_EQ(test::check_forward(forward_in_tiles, instance), "") << test_case.name;
    if (test_case.grouping.skip == 0) {
      EXPECT_EQ(test::check_backward(backward_in_tiles, instance), "") << test_case.name;
    }
  }
}

TEST_F(CpuTiles, ComputeOddNumbersOfKeysColumnsAndRows) {
  for (const std::int64_t n : {1, 3, 127, 131}) {
    for (const std::int64_t d : {1, 15, 33, 64, 80, 130, 256}) {
      for (const std::int64_t block : {3, 128}) {
        check(test::square(n, d, Causal::none,
                           {.strategy = Strategy::energy, .group_size = d > 1 ? 2 : 1, .block = block}),
              "n " + std::to_string(n) + ", d " + std::to_string(d) + ", blocks of " + std::to_string(block));
      }
    }
  }
}

void forward_by_256_rows(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                         const Execution& execution) {
  Execution by_more = execution;
  by_more.tile_rows = cpu::kTaskQueries;
  forward_in_tiles(problem, grouping, tensors, by_more);
}

TEST_F(CpuTiles, ComputeTasksOfMoreRows) {
  for (const char* name :
       {"causal, square", "energy, previous", "many rows, few keys", "skip, exact",
        "near, energy, blocks of 100 rows, previous, not causal", "near, energy, additive mask, negative key offset"}) {
    Instance instance(test::with_dtype(test::find(name), DType::bf16));
    EXPECT_GT(instance.test_case.problem.seq_q, cpu::kTileQueries) << name;
    EXPECT_EQ(test::check_forward(forward_by_256_rows, instance), "") << name;
  }
}

TEST_F(CpuTiles, HaveTheSameBitsForAnyNumberOfThreads) {
  for (const char* name : {"odd sizes", "causal, square", "lsh, short last group", "near, given"}) {
    Instance instance(test::with_dtype(test::find(name), DType::bf16));
    const Case& test_case = instance.test_case;
    Execution execution;
    execution.threads = 1;
    forward_in_tiles(test_case.problem, test_case.grouping, instance.forward(), execution);
    for (const int threads : {2, 5}) {
      Buffer o = instance.output();
      Buffer lse = instance.lse_output();
      execution.threads = threads;
      forward_in_tiles(test_case.problem, test_case.grouping, instance.forward_into(o, lse), execution);
      EXPECT_TRUE(o == instance.o && lse == instance.lse) << name << ", " << threads << " threads";
    }
  }
}

// Registers are full: what is behind the operands is 0, and NaN times 0 is NaN, in its own row alone.
TEST_F(CpuTiles, TakeNanAndInfinityWhereExactAttentionDoes) {
  for (const char* name : {"odd sizes", "causal, square", "additive mask", "energy", "lsh, mean"}) {
    for (const double value : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      for (int which = 0; which < 3; ++which) {
        Instance instance(test::with_dtype(test::find(name), DType::bf16));
        Buffer& buffer = which == 0 ? instance.q : which == 1 ? instance.k : instance.v;
        buffer.set(buffer.count() / 2, value);
        EXPECT_EQ(test::check_forward(forward_in_tiles, instance), "") << name << ", " << value << " in "
                                                                       << "qkv"[which];
      }
    }
  }
}

}  // namespace
}  // namespace distr
#endif
