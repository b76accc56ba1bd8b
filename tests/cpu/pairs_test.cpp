// SPDX-License-Identifier: Apache-2.0
// Products of pairs of bf16, on CPUs with AMX and AMD's with AVX512_BF16. The other tests of bf16 use them there, too.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

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

// The kernels that other CPUs take.
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
  if (cpu::products_of_bf16() == cpu::Products::of_floats) {
    GTEST_SKIP() << "the CPU takes no pairs";
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

// A tile's words behind the last key, column or row are never read, or are zeros: what was in the workspace before
// changes no bit.
TEST(CpuPairs, WhatTheWorkspaceHeldChangesNoBits) {
  for (const char* name : {"odd sizes", "lsh, short last group", "energy, previous", "near, given",
                           "near, energy, window 129, G 3, blocks of 64 rows"}) {
    const Case test_case = test::with_dtype(test::find(name), DType::bf16);
    const Problem& p = test_case.problem;
    Instance instance(test_case);
    const auto outputs = [&](float before) {
      Execution execution;
      execution.threads = 1;
      const auto with_workspace = [&](Operation operation) {
        execution.workspace_bytes = workspace_bytes(operation, p, test_case.grouping, execution);
        std::vector<float> workspace(execution.workspace_bytes / sizeof(float), before);
        execution.workspace = workspace.data();
        return workspace;
      };
      auto workspace = with_workspace(Operation::forward);
      forward(p, test_case.grouping, instance.forward(), execution);
      const auto size = [&](const Strides& s, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
        return Buffer(test::extent(s, p.batch, heads, rows, columns), p.dtype);
      };
      std::vector<Buffer> found{instance.o, size(p.q, p.heads_q, p.seq_q, p.head_dim),
                                size(p.k, p.heads_kv, p.seq_k, p.head_dim),
                                size(p.v, p.heads_kv, p.seq_k, p.head_dim_v)};
      BackwardTensors tensors{instance.q_data(),     instance.k_data(), instance.v_data(),   instance.mask_data(),
                              instance.order.data(), instance.o.data(), instance.lse.data(), instance.o.data()};
      tensors.key_means = instance.key_means.data();
      tensors.d_q = found[1].data();
      tensors.d_k = found[2].data();
      tensors.d_v = found[3].data();
      workspace = with_workspace(Operation::backward);
      backward(p, test_case.grouping, tensors, execution);
      return found;
    };
    const std::vector<Buffer> zeros = outputs(0);
    EXPECT_TRUE(zeros == outputs(std::numeric_limits<float>::quiet_NaN())) << name;
    EXPECT_TRUE(zeros == outputs(std::numeric_limits<float>::infinity())) << name;
  }
}

// A gradient of infinity in dO, and its row's key alone: dV of other keys keeps its bits.
TEST(CpuPairs, InfiniteUpstreamGradientsReachNoOtherKey) {
  Case test_case = test::square(150, 17, Causal::top_left, {.strategy = Strategy::exact});
  test_case.problem.dtype = DType::bf16;
  Instance instance(test_case);
  const Problem& p = test_case.problem;
  forward(p, test_case.grouping, instance.forward());
  const auto d_v_of = [&](const Buffer& d_o) {
    Buffer d_q(instance.q.count(), p.dtype), d_k(instance.k.count(), p.dtype), d_v(instance.v.count(), p.dtype);
    BackwardTensors tensors{instance.q_data(), instance.k_data(), instance.v_data(),   nullptr,
                            nullptr,           instance.o.data(), instance.lse.data(), d_o.data()};
    tensors.d_q = d_q.data();
    tensors.d_k = d_k.data();
    tensors.d_v = d_v.data();
    backward(p, test_case.grouping, tensors);
    return d_v;
  };
  Buffer d_o = instance.o;
  const Buffer before = d_v_of(d_o);
  d_o.set(3, std::numeric_limits<double>::infinity());  // row 0, which sees key 0 alone
  const Buffer after = d_v_of(d_o);
  for (std::int64_t n = 0; n < after.count(); ++n) {
    EXPECT_EQ(after.at(n) == before.at(n), n != 3) << n;
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

// The columns that finish a score begin with a pair of their own, and may be odd in number.
TEST(CpuPairs, FinishesOddNumbersOfColumns) {
  for (const auto& [d, size] : {std::pair<std::int64_t, std::int64_t>{13, 3}, {15, 4}, {32, 3}}) {
    Case test_case = test::square(517, d, Causal::none,
                                  {.strategy = Strategy::energy,
                                   .group_size = size,
                                   .order_from = OrderFrom::own,
                                   .window = 64,
                                   .skip = 0.01F,
                                   .finish = true});
    Instance instance(test::with_dtype(test_case, DType::bf16));
    EXPECT_EQ(test::check_forward(forward, instance), "") << "d " << d << ", G " << size;
  }
}

}  // namespace
}  // namespace distr
