// SPDX-License-Identifier: Apache-2.0
// What `auto` is told of a GPU, whatever kernels it has; needs none.
#include <gtest/gtest.h>

#include "cuda/heuristics.h"

namespace distr::cuda {
namespace {

constexpr HopperServes kNothing{};
constexpr HopperServes kExact{.exact = true};
constexpr HopperServes kBoth{.exact = true, .energy = true};

Problem problem_of(std::int64_t rows, DType dtype = DType::bf16) {
  Problem problem;
  problem.dtype = dtype;
  problem.seq_q = problem.seq_k = rows;
  problem.head_dim = problem.head_dim_v = 64;
  return problem;
}

TEST(Advice, ComparesWithTheExactKernelThatTheGpuHas) {
  EXPECT_TRUE(advise(problem_of(8192), {}, kNothing).pays);
  EXPECT_EQ(advise(problem_of(8192), {}, kNothing).why, "which pays from 8192 rows and keys on, and errs least");
  EXPECT_FALSE(advise(problem_of(8192), {}, kBoth).pays);
  EXPECT_EQ(advise(problem_of(16383), {}, kBoth).why,
            "as 16383 rows or keys are too few for an approximation to pay (from 16384 on it does)");
  EXPECT_EQ(advise(problem_of(16384), {}, kBoth).why, "which pays from 16384 rows and keys on, and errs least");
}

TEST(Advice, IsExactWhereHopperServesNothingElseAsWell) {
  const char* const words =
      "as this GPU has kernels for it that an approximation is quicker than, forward and backward, only in bf16 with "
      "the whole sequence as one block";
  EXPECT_EQ(advise(problem_of(1 << 20), {}, kExact).why, words);
  EXPECT_EQ(advise(problem_of(1 << 20, DType::f16), {}, kBoth).why, words);
  EXPECT_FALSE(advise(problem_of(1 << 20), {}, kExact).pays);
}

TEST(Advice, SaysWhatWasNotMeasured) {
  Grouping short_blocks;
  short_blocks.block = 192;
  EXPECT_EQ(advise(problem_of(8192), short_blocks, kNothing).why,
            "as on a GPU an approximation pays for blocks that 128 divides, and 192 is none");
  EXPECT_TRUE(advise(problem_of(192 * 128), {.block = 192 * 128}, kNothing).pays);
  EXPECT_EQ(advise(problem_of(8192, DType::f32), {}, kNothing).why,
            "as on a GPU no approximation has been measured in other types than f16 and bf16");
}

}  // namespace
}  // namespace distr::cuda
