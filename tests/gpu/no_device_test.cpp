// SPDX-License-Identifier: Apache-2.0
// The CUDA backend on a machine that cannot run it, and what its kernels refuse: neither needs a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "distr/attention.h"
#include "distr/error.h"

namespace distr {
namespace {

Problem problem_of(DType dtype = DType::bf16, std::int64_t head_dim = 64) {
  Problem problem;
  problem.dtype = dtype;
  problem.seq_q = problem.seq_k = 300;
  problem.head_dim = problem.head_dim_v = head_dim;
  return contiguous(problem);
}

Grouping grouping_of(Strategy strategy, std::int64_t group_size = 2, std::int64_t block = 128) {
  Grouping grouping;
  grouping.strategy = strategy;
  grouping.group_size = group_size;
  grouping.block = block;
  return grouping;
}

Grouping near_of(Strategy strategy, std::int64_t block) {
  Grouping grouping = grouping_of(strategy, 2, block);
  grouping.window = 50;
  grouping.sinks = 10;
  return grouping;
}

// "no such kernel" if there is none.
std::string reason_of(const std::string& kernel, Operation operation, const Problem& problem,
                      const Grouping& grouping) {
  for (const KernelVerdict& verdict : explain(operation, problem, grouping, Device::cuda).verdicts) {
    if (verdict.kernel.name == kernel) {
      return verdict.reason;
    }
  }
  return "no such kernel";
}

// What must be found wrong with the driver that stands for the machine's (tests/gpu/CMakeLists.txt).
std::string expected_reason() {
  const char* expected = std::getenv("DISTR_EXPECTED_REASON");
  EXPECT_NE(expected, nullptr) << "ctest sets DISTR_EXPECTED_REASON, and a driver to match";
  return expected == nullptr ? "" : expected;
}

std::string failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::unsupported);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(NoDevice, EveryQuestionIsAnsweredInWords) {
  EXPECT_TRUE(device_names(Device::cuda).empty());
  for (const Operation operation : {Operation::grouping, Operation::forward, Operation::backward}) {
    const Explanation explanation = explain(operation, problem_of(), grouping_of(Strategy::exact, 1), Device::cuda);
    EXPECT_EQ(explanation.kernel, "");
    EXPECT_TRUE(std::any_of(explanation.verdicts.begin(), explanation.verdicts.end(),
                            [](const KernelVerdict& verdict) { return verdict.reason == expected_reason(); }));
  }
}

TEST(NoDevice, CallsAreRefusedWithEveryKernelsReason) {
  const Problem problem = problem_of(DType::f32);
  const Grouping grouping = grouping_of(Strategy::lsh);
  std::vector<float> x(300 * 64);
  std::vector<std::int32_t> order(3 * 64);
  Execution execution;
  execution.device = Device::cuda;
  const std::string words = failure([&] {
    forward(problem, grouping, {x.data(), x.data(), x.data(), nullptr, order.data(), x.data()}, execution);
  });
  EXPECT_EQ(words.rfind("no kernel on cuda serves this problem; ", 0), 0U) << words;
  for (const KernelVerdict& verdict : explain(Operation::forward, problem, grouping, Device::cuda).verdicts) {
    EXPECT_NE(words.find(verdict.kernel.name + ": " + verdict.reason), std::string::npos) << words;
  }
  EXPECT_NE(words.find(expected_reason()), std::string::npos) << words;
  EXPECT_EQ(failure([&] { static_cast<void>(workspace_bytes(Operation::forward, problem, grouping, execution)); }),
            words);
}

TEST(Refusals, AreInWords) {
  struct Case {
    const char* kernel;
    Operation operation;
    Problem problem;
    Grouping grouping;
    const char* words;
  };
  const Grouping exact = grouping_of(Strategy::exact, 1);
  const Grouping lsh = grouping_of(Strategy::lsh);
  const Grouping energy = grouping_of(Strategy::energy);
  const Problem f64 = problem_of(DType::f64);
  const char* const only_fp32 = "computes in fp32; f64 is for the reference";
  Problem capped = problem_of();
  capped.softcap = 30;
  Problem many = problem_of(DType::bf16, 1);
  many.batch = std::int64_t{1} << 31;
  Problem long_sequence = problem_of(DType::bf16, 1);
  long_sequence.seq_k = std::int64_t{1} << 40;
  Problem negative_scale = problem_of();
  negative_scale.scale = -1;
  Problem tiny_scale = problem_of();
  tiny_scale.scale = 1e-21;
  Problem huge_scale = problem_of();
  huge_scale.scale = 1e21;
  const Case cases[] = {
      {"plain/forward", Operation::forward, f64, exact, only_fp32},
      {"plain/backward", Operation::backward, f64, exact, only_fp32},
      {"plain/forward", Operation::forward, many, exact, "the grid would have more than 2147483647 tiles of 64 rows"},
      {"plain/backward", Operation::backward, long_sequence, exact,
       "the grid would have more than 2147483647 tiles of 64 rows"},
      {"cuda/lsh", Operation::grouping, f64, lsh, only_fp32},
      {"cuda/energy", Operation::grouping, f64, energy, only_fp32},
      {"cuda/lsh", Operation::grouping, problem_of(), exact, "the problem is exact: the order is the identity"},
      {"cuda/lsh", Operation::grouping, problem_of(), energy, "serves the strategy lsh only"},
      {"cuda/energy", Operation::grouping, problem_of(), lsh, "serves the strategy energy only"},
      {"cuda/exact", Operation::grouping, problem_of(), lsh,
       "serves exact problems only: the strategy exact, or groups of one column"},
      {"sm80/forward", Operation::forward, problem_of(DType::f32), exact, "takes f16 and bf16"},
      {"sm80/forward", Operation::forward, many, exact, "the grid would have more than 2147483647 tiles of 64 rows"},
      {"sm90/forward", Operation::forward, many, exact, "the grid would have more than 2147483647 tiles of 64 rows"},
      {"sm90/forward", Operation::forward, problem_of(DType::f32), exact, "takes f16 and bf16"},
      {"sm90/forward", Operation::forward, problem_of(DType::f16, 129), exact,
       "takes head_dim and head_dim_v up to 128"},
      {"sm90/forward", Operation::forward, problem_of(), lsh,
       "takes one grouping for the whole sequence: blocks of at least seq_q rows"},
      {"sm90/forward_blocks", Operation::forward, problem_of(), exact,
       "takes groupings of blocks of less than seq_q rows"},
      {"sm90/forward_blocks", Operation::forward, problem_of(), grouping_of(Strategy::energy, 2, 96),
       "takes blocks of a multiple of 64 rows"},
      {"sm80/forward", Operation::forward, problem_of(DType::f16, 257), exact,
       "takes head_dim and head_dim_v up to 256"},
      {"sm80/forward", Operation::forward, long_sequence, exact, "takes sequences up to 4194303"},
      {"sm80/backward", Operation::backward, problem_of(DType::f32), exact, "takes f16 and bf16"},
      {"sm80/backward", Operation::backward, problem_of(DType::f16, 257), exact,
       "takes head_dim and head_dim_v up to 256"},
      {"sm80/backward", Operation::backward, negative_scale, exact, "takes scales above 0"},
      {"sm80/backward", Operation::backward, long_sequence, exact, "takes sequences up to 4194303"},
      {"sm80/backward", Operation::backward, many, exact,
       "takes up to 68719476704 rows of Q, each head's up to a multiple of 128"},
      {"sm80/backward_atomics", Operation::backward, problem_of(DType::f32), exact, "takes f16 and bf16"},
      {"sm90/backward", Operation::backward, problem_of(DType::f32), exact, "takes f16 and bf16"},
      {"sm90/backward", Operation::backward, problem_of(DType::f16, 129), exact,
       "takes head_dim and head_dim_v up to 128"},
      {"sm90/backward", Operation::backward, negative_scale, exact, "takes scales above 0"},
      {"sm90/backward", Operation::backward, tiny_scale, exact, "takes scales from 1e-20 to 1e20"},
      {"sm90/backward_atomics", Operation::backward, huge_scale, exact, "takes scales from 1e-20 to 1e20"},
      {"sm90/backward", Operation::backward, long_sequence, exact, "takes sequences up to 4194303"},
      {"sm90/backward", Operation::backward, many, exact, "the grid would have more than 2147483647 tiles of 64 rows"},
      {"sm90/backward", Operation::backward, problem_of(), grouping_of(Strategy::lsh, 2, 48),
       "takes blocks that 64 divides, or of at least seq_q rows"},
      {"sm90/backward", Operation::backward, problem_of(), near_of(Strategy::lsh, 64),
       "takes near keys of blocks of a multiple of 128 rows"},
      {"sm90/forward", Operation::forward, capped, energy, "caps scores in exact attention alone"},
      {"sm90/backward", Operation::backward, capped, energy, "caps scores in exact attention alone"},
      {"sm80/sequences", Operation::forward, capped, exact, "caps no scores; softcap is for other kernels"},
      {"sm80/backward", Operation::backward, problem_of(), near_of(Strategy::energy, 128),
       "has no near keys; window and sinks are for other kernels"},
  };
  for (const Case& test_case : cases) {
    EXPECT_EQ(reason_of(test_case.kernel, test_case.operation, test_case.problem, test_case.grouping), test_case.words)
        << test_case.kernel;
  }
}

// Near keys of one grouping and of blocks are taken whatever is dropped or summed, in a sliding window or not.
TEST(Refusals, LeaveHoppersKernelsForNearKeys) {
  Problem sliding = problem_of();
  sliding.window_left = 100;
  for (const Problem& problem : {problem_of(), sliding}) {
    for (const Strategy strategy : {Strategy::lsh, Strategy::energy, Strategy::given}) {
      for (const std::int64_t block : {128, 256, 1000000}) {
        const Grouping near = near_of(strategy, block);
        EXPECT_EQ(reason_of(block < 300 ? "sm90/forward_blocks" : "sm90/forward", Operation::forward, problem, near),
                  expected_reason());
        for (const char* kernel : {"sm90/backward", "sm90/backward_atomics"}) {
          EXPECT_EQ(reason_of(kernel, Operation::backward, problem, near), expected_reason());
        }
      }
    }
    EXPECT_EQ(reason_of("sm80/forward", Operation::forward, problem, near_of(Strategy::energy, 64)), expected_reason());
  }
  Grouping part = near_of(Strategy::lsh, 128);
  part.part = Part{128, 256};
  EXPECT_EQ(reason_of("sm90/backward", Operation::backward, problem_of(), part), expected_reason());
}

// The portable kernels on tensor cores take every length of block and every size of group.
TEST(Refusals, LeaveTensorCoresForEveryGrouping) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::int64_t head_dim : {1, 23, 64, 256}) {
      for (const Strategy strategy : {Strategy::lsh, Strategy::energy}) {
        for (const std::int64_t block : {1, 3, 128, 1000000}) {
          const Grouping grouping = grouping_of(strategy, std::min<std::int64_t>(3, head_dim), block);
          const Problem problem = problem_of(dtype, head_dim);
          EXPECT_EQ(reason_of("sm80/forward", Operation::forward, problem, grouping), expected_reason());
          for (const char* kernel : {"sm80/backward", "sm80/backward_atomics"}) {
            EXPECT_EQ(reason_of(kernel, Operation::backward, problem, grouping), expected_reason());
          }
        }
      }
    }
  }
}

// What nothing but the device can stop: f16, bf16 and f32 of any shape have a kernel for every operation.
TEST(Refusals, LeaveAKernelForEveryProblemInFp32) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const std::int64_t head_dim : {1, 23, 64, 512}) {
      for (const Grouping& grouping : {grouping_of(Strategy::exact, 1), grouping_of(Strategy::lsh, 1),
                                       grouping_of(Strategy::energy, 1, 3), grouping_of(Strategy::lsh, 1, 1)}) {
        const Problem problem = problem_of(dtype, head_dim);
        Grouping grouped = grouping;
        grouped.group_size = std::min<std::int64_t>(2, head_dim);
        for (const Grouping& setting : {grouping, grouped}) {
          EXPECT_EQ(reason_of("plain/forward", Operation::forward, problem, setting), expected_reason());
          EXPECT_EQ(reason_of("plain/backward", Operation::backward, problem, setting), expected_reason());
        }
      }
    }
  }
}

}  // namespace
}  // namespace distr
