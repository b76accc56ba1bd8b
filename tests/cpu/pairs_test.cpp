// SPDX-License-Identifier: Apache-2.0
// Products of pairs of bf16, where the CPU has them; the other tests take them by themselves there.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "cpu/kernel_name.h"
#include "support/oracle.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

void forward_by_floats(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                       const Execution& execution) {
  Execution named = execution;
  named.kernel = "cpu/forward";
  forward(problem, grouping, tensors, named);
}

void backward_by_floats(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                        const Execution& execution) {
  Execution named = execution;
  named.kernel = "cpu/backward";
  backward(problem, grouping, tensors, named);
}

// The kernels that a CPU without AVX512_BF16 takes.
TEST(CpuPairs, FloatsServeBf16Too) {
  for (const char* name : {"odd sizes", "lsh, short last group", "energy, previous", "additive mask", "near, given",
                           "sliding window, GQA", "softcap"}) {
    Instance instance(test::with_dtype(test::find(name), DType::bf16));
    EXPECT_EQ(test::check_forward(forward_by_floats, instance), "") << name;
    EXPECT_EQ(test::check_backward(backward_by_floats, instance), "") << name;
  }
}

TEST(CpuPairs, NanAndInfinityGoWhereTheyGoInExactAttention) {
  for (const char* name : {"odd sizes", "causal, square", "additive mask", "energy", "lsh, mean"}) {
    for (int which = 0; which < 3; ++which) {
      Instance instance(test::with_dtype(test::find(name), DType::bf16));
      Buffer& buffer = which == 0 ? instance.q : which == 1 ? instance.k : instance.v;
      buffer.set(buffer.count() / 2, std::numeric_limits<double>::infinity());
      EXPECT_EQ(test::check_forward(forward, instance), "") << name << ", infinity in "
                                                            << "qkv"[which];
    }
  }
}

// What a row does not see changes none of its bits, whatever is taken out of the products for it.
TEST(CpuPairs, HiddenInfinitiesChangeNoBits) {
  if (!cpu::multiplies_pairs()) {
    GTEST_SKIP() << "the CPU has no AVX512_BF16";
  }
  for (const double value : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    Instance instance(test::with_dtype(test::find("causal, square"), DType::bf16));
    const Problem& p = instance.test_case.problem;
    const Grouping& grouping = instance.test_case.grouping;
    forward(p, grouping, instance.forward());
    const Buffer before = instance.o;
    const std::int64_t last = p.seq_k - 1;
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      instance.v.set(last * p.v.row + c, value);
    }
    forward(p, grouping, instance.forward());
    for (std::int64_t i = 0; i < p.seq_q; ++i) {
      for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
        const std::int64_t at = i * p.o.row + c;
        EXPECT_EQ(instance.o.at(at) == before.at(at), i < last) << "row " << i << ", column " << c;
      }
    }
  }
}

// A pair's second half has a partner of 0 where keys, columns or rows are odd in number.
TEST(CpuPairs, OddNumbersOfKeysColumnsAndRows) {
  for (const std::int64_t n : {1, 2, 3, 127, 129, 131}) {
    for (const std::int64_t d : {1, 3, 15, 17, 33}) {
      for (const std::int64_t block : {1, 3, 128}) {
        Case test_case = test::square(n, d, Causal::none,
                                      {.strategy = Strategy::energy, .group_size = d > 1 ? 2 : 1, .block = block});
        Instance instance(test::with_dtype(test_case, DType::bf16));
        SCOPED_TRACE("n " + std::to_string(n) + ", d " + std::to_string(d) + ", blocks of " + std::to_string(block));
        EXPECT_EQ(test::check_forward(forward, instance), "");
        EXPECT_EQ(test::check_backward(backward, instance), "");
      }
    }
  }
}

}  // namespace
}  // namespace distr
