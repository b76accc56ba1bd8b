// SPDX-License-Identifier: Apache-2.0
#include "distr/blocks.h"

#include <gtest/gtest.h>

#include <vector>

#include "distr/error.h"

namespace distr {
namespace {

constexpr std::int64_t kKilobyte = 1024;

struct Expected {
  std::int64_t kilobytes, head_dim;
  BlockRule rule;
  std::int64_t l, m;
};

GpuProperties gpu_with(std::int64_t kilobytes) {
  GpuProperties gpu;
  gpu.shared_memory = kilobytes * kKilobyte;
  return gpu;
}

void expect_choices(const std::vector<Expected>& cases) {
  for (const Expected& expected : cases) {
    const BlockChoice choice = choose_blocks(gpu_with(expected.kilobytes), expected.head_dim, expected.rule);
    EXPECT_EQ(choice.l, expected.l) << expected.kilobytes << " KB, d " << expected.head_dim;
    EXPECT_EQ(choice.m, expected.m) << expected.kilobytes << " KB, d " << expected.head_dim;
  }
}

TEST(Blocks, LiteralRule) {
  expect_choices({{100, 32, BlockRule::literal, 768, 16},
                  {100, 64, BlockRule::literal, 368, 16},
                  {100, 128, BlockRule::literal, 160, 16},
                  {228, 32, BlockRule::literal, 1792, 16},
                  {228, 64, BlockRule::literal, 880, 16},
                  {228, 128, BlockRule::literal, 416, 16}});
}

TEST(Blocks, PowersOfTwo) {
  expect_choices({{100, 32, BlockRule::powers_of_two, 256, 256},
                  {100, 64, BlockRule::powers_of_two, 256, 64},
                  {100, 128, BlockRule::powers_of_two, 128, 32},
                  {228, 128, BlockRule::powers_of_two, 256, 64}});
}

// The paper prints (256, 64), (128, 128), (128, 32): at d = 64, (256, 32) has as many accumulators and the larger l.
TEST(Blocks, Registers) {
  expect_choices({{100, 32, BlockRule::registers, 256, 64},
                  {100, 64, BlockRule::registers, 256, 32},
                  {100, 128, BlockRule::registers, 128, 32},
                  {228, 128, BlockRule::registers, 128, 64}});
}

TEST(Blocks, RegistersExplainThePrintedRowsFromOneBoundToAnother) {
  const auto choose = [](std::int64_t accumulators, std::int64_t head_dim) {
    GpuProperties gpu = gpu_with(100);
    gpu.registers_per_thread = accumulators / 128;
    return choose_blocks(gpu, head_dim, BlockRule::registers);
  };
  for (const std::int64_t accumulators : {24576, 32640}) {
    EXPECT_EQ(choose(accumulators, 32).m, 64);
    EXPECT_EQ(choose(accumulators, 64).m, 32);
    EXPECT_EQ(choose(accumulators, 128).m, 32);
  }
  EXPECT_EQ(choose(24448, 32).m, 32);
  EXPECT_EQ(choose(32768, 64).m, 64);
}

void expect_limit(const BlockLimit& limit, BlockConstraint constraint, bool rounded) {
  EXPECT_EQ(limit.constraint, constraint);
  EXPECT_EQ(limit.rounded, rounded);
}

TEST(Blocks, LimitsOfTheLiteralRule) {
  const BlockChoice full = choose_blocks(gpu_with(100), 32, BlockRule::literal);  // 768 + 2 * 16 = 800, all there is
  expect_limit(full.l_limit, BlockConstraint::shared_memory, false);
  expect_limit(full.m_limit, BlockConstraint::shared_memory, false);
  const BlockChoice rest = choose_blocks(gpu_with(100), 128, BlockRule::literal);  // 160 + 2 * 16 = 192 of 200
  expect_limit(rest.l_limit, BlockConstraint::shared_memory, true);
  expect_limit(rest.m_limit, BlockConstraint::shared_memory, true);
}

TEST(Blocks, LimitsOfPowersOfTwoAndRegisters) {
  const BlockChoice capped = choose_blocks(gpu_with(100), 32, BlockRule::powers_of_two);
  expect_limit(capped.l_limit, BlockConstraint::cap, false);
  expect_limit(capped.m_limit, BlockConstraint::cap, false);
  const BlockChoice shared = choose_blocks(gpu_with(100), 64, BlockRule::powers_of_two);
  expect_limit(shared.l_limit, BlockConstraint::cap, false);
  expect_limit(shared.m_limit, BlockConstraint::shared_memory, true);
  for (const std::int64_t head_dim : {32, 64}) {
    const BlockChoice choice = choose_blocks(gpu_with(100), head_dim, BlockRule::registers);
    expect_limit(choice.l_limit, BlockConstraint::cap, false);
    expect_limit(choice.m_limit, BlockConstraint::registers, true);
  }
  expect_limit(choose_blocks(gpu_with(228), 128, BlockRule::registers).l_limit, BlockConstraint::registers, true);
}

TEST(Blocks, ChoiceMeetsTheEquationsAndNoLargerOneDoes) {
  const auto fits = [](std::int64_t bytes, std::int64_t head_dim, std::int64_t l, std::int64_t m) {
    const auto block_bytes = static_cast<double>(2 * (l * head_dim + 2 * m * head_dim));
    return 4.0 * static_cast<double>(bytes) / block_bytes >= 2 * 4;
  };
  for (std::int64_t bytes = 40000; bytes < 300000; bytes += 7919) {
    for (const std::int64_t d : {1, 16, 40, 96, 128, 192}) {
      GpuProperties gpu;
      gpu.shared_memory = bytes;
      const BlockChoice choice = choose_blocks(gpu, d, BlockRule::literal);
      EXPECT_EQ(choice.l % 16 + choice.m % 16, 0);
      EXPECT_TRUE(fits(bytes, d, choice.l, choice.m));
      EXPECT_FALSE(fits(bytes, d, choice.l + 16, 16));
      EXPECT_FALSE(fits(bytes, d, choice.l, choice.m + 16));
      EXPECT_EQ(choice.l_limit.rounded, fits(bytes, d, choice.l + 1, 16));
    }
  }
}

TEST(Blocks, RefusesWhatCannotBe) {
  EXPECT_THROW(static_cast<void>(choose_blocks(gpu_with(0), 64, BlockRule::literal)), Error);
  EXPECT_THROW(static_cast<void>(choose_blocks(gpu_with(100), 0, BlockRule::literal)), Error);
  EXPECT_THROW(static_cast<void>(choose_blocks(gpu_with(100), 513, BlockRule::literal)), Error);
  EXPECT_THROW(static_cast<void>(choose_blocks(gpu_with(4), 64, BlockRule::literal)), Error);
  EXPECT_THROW(static_cast<void>(choose_blocks(gpu_with(100), 64, BlockRule::literal, {0, 2})), Error);
  EXPECT_THROW(static_cast<void>(choose_blocks(gpu_with(100), 64, BlockRule::literal, {4, 0})), Error);
  GpuProperties gpu = gpu_with(100);
  gpu.tensor_cores = 0;
  EXPECT_THROW(static_cast<void>(choose_blocks(gpu, 64, BlockRule::literal)), Error);
  gpu.tensor_cores = 4;
  gpu.registers_per_thread = 8;
  EXPECT_THROW(static_cast<void>(choose_blocks(gpu, 64, BlockRule::registers)), Error);
}

}  // namespace
}  // namespace distr
