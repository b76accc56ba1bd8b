// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <hwy/highway.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>

#include "cpu/kernel_name.h"
#include "support/normal.h"
#include "support/oracle.h"
#include "support/types_of_case.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

TEST(CpuBackward, IsWithinToleranceOnEveryCase) {
  constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
  for (std::size_t n = 0; n < test::cases().size(); ++n) {
    const Case& test_case = test::cases()[n];
    for (const DType dtype : test::types_of_case(n, kTypes)) {
      Instance instance(test::with_dtype(test_case, dtype));
      EXPECT_EQ(explain(Operation::backward, instance.test_case.problem, test_case.grouping).kernel,
                test::cpu_kernel(Operation::backward, dtype));
      EXPECT_EQ(test::check_backward(backward, instance), "") << test_case.name << ", " << test::name_of(dtype);
    }
  }
}

TEST(CpuBackward, IsWithinToleranceOnEveryInstructionSet) {
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    for (const char* name : {"odd sizes", "lsh, short last group", "energy, previous", "additive mask", "softcap"}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Instance instance(test::with_dtype(test::find(name), dtype));
        EXPECT_EQ(test::check_backward(backward, instance), "")
            << name << ", " << test::name_of(dtype) << ", " << hwy::TargetName(target);
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

// All gradients of an instance, from random O, LSE and upstream gradients that need not belong together.
struct Outputs {
  Outputs(Instance& instance, int threads) {
    const Problem& p = instance.test_case.problem;
    forward(p, instance.test_case.grouping, instance.forward());
    Buffer d_o = instance.output();
    std::mt19937_64 random(9);
    test::Normal normal;
    for (std::int64_t n = 0; n < d_o.count(); ++n) {
      d_o.set(n, normal(random));
    }
    const auto size = [&](const Strides& s, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
      return Buffer(test::extent(s, p.batch, heads, rows, columns), p.dtype);
    };
    d_q = size(p.q, p.heads_q, p.seq_q, p.head_dim);
    d_k = size(p.k, p.heads_kv, p.seq_k, p.head_dim);
    d_v = size(p.v, p.heads_kv, p.seq_k, p.head_dim_v);
    d_mask = Buffer(instance.mask.count(), p.lse_dtype());
    BackwardTensors tensors{instance.q_data(),     instance.k_data(), instance.v_data(),   instance.mask_data(),
                            instance.order.data(), instance.o.data(), instance.lse.data(), d_o.data()};
    tensors.d_q = d_q.data();
    tensors.d_k = d_k.data();
    tensors.d_v = d_v.data();
    tensors.d_mask = p.mask.kind == MaskKind::additive ? d_mask.data() : nullptr;
    Execution execution;
    execution.threads = threads;
    execution.workspace_bytes = workspace_bytes(Operation::backward, p, instance.test_case.grouping, execution);
    Buffer workspace(static_cast<std::int64_t>(execution.workspace_bytes / sizeof(float)), DType::f32);
    execution.workspace = workspace.data();
    backward(p, instance.test_case.grouping, tensors, execution);
    EXPECT_TRUE(workspace.canaries_intact() && d_q.canaries_intact() && d_k.canaries_intact() &&
                d_v.canaries_intact() && d_mask.canaries_intact());
  }
  bool operator==(const Outputs& other) const = default;

  Buffer d_q, d_k, d_v, d_mask;
};

TEST(CpuBackward, HasTheSameBitsForAnyNumberOfThreadsWithinItsWorkspace) {
  constexpr int kThreadCounts[] = {2, 5};
  for (const Case& test_case : test::cases()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(test_case.name + ", " + test::name_of(dtype));
      Instance instance(test::with_dtype(test_case, dtype));
      const Outputs one(instance, 1);
      for (const int threads : test::thread_counts(kThreadCounts)) {
        EXPECT_TRUE(one == Outputs(instance, threads)) << threads << " threads";
      }
    }
  }
}

// Keys and rows that do not see each other do not touch each other's gradients, whatever they hold.
TEST(CpuBackward, NanAndInfinityGoWhereTheyGoInExactAttention) {
  for (const char* name : {"odd sizes", "causal, square", "padding mask", "additive mask", "energy", "lsh, mean",
                           "sliding window across tiles", "softcap, causal, GQA", "near, energy, only sinks, causal"}) {
    for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      for (int which = 0; which < 6; ++which) {
        Instance instance(test::with_dtype(test::find(name), which < 3 ? DType::f32 : DType::bf16));
        Buffer& buffer = which % 3 == 0 ? instance.q : which % 3 == 1 ? instance.k : instance.v;
        buffer.set(buffer.count() / 2, value);
        EXPECT_EQ(test::check_backward(backward, instance), "") << name << ", " << value << " in "
                                                                << "qkv"[which % 3] << (which < 3 ? ", f32" : ", bf16");
      }
    }
  }
}

// With gradients [B, H, N, d] that lie in memory as [B, N, H, d] and three more numbers, and are copied from there.
void backward_into_other_strides(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                                 const Execution& execution) {
  struct Gradient {
    Strides to, from;
    std::int64_t heads, rows, columns;
    void* data;
    Buffer buffer;
  };
  const auto gradient = [&](const Strides& to, std::int64_t heads, std::int64_t rows, std::int64_t columns,
                            void* data) {
    const std::int64_t row = heads * columns + 3;
    return Gradient{to,   {.batch = rows * row, .head = columns, .row = row}, heads, rows, columns,
                    data, {problem.batch * rows * row, problem.dtype}};
  };
  std::array gradients{
      gradient(problem.q, problem.heads_q, problem.seq_q, problem.head_dim, tensors.d_q),
      gradient(problem.k, problem.heads_kv, problem.seq_k, problem.head_dim, tensors.d_k),
      gradient(problem.v, problem.heads_kv, problem.seq_k, problem.head_dim_v, tensors.d_v),
  };
  Problem own = problem;
  std::tie(own.d_q, own.d_k, own.d_v) = std::tuple(gradients[0].from, gradients[1].from, gradients[2].from);
  BackwardTensors into = tensors;
  std::tie(into.d_q, into.d_k, into.d_v) =
      std::tuple(gradients[0].buffer.data(), gradients[1].buffer.data(), gradients[2].buffer.data());
  backward(own, grouping, into, execution);
  for (Gradient& g : gradients) {
    EXPECT_TRUE(g.buffer.canaries_intact());
    const auto start = [&](const Strides& s, std::int64_t row) {
      return static_cast<std::size_t>(row / g.rows / g.heads * s.batch + row / g.rows % g.heads * s.head +
                                      row % g.rows * s.row) *
             size_of(problem.dtype);
    };
    for (std::int64_t row = 0; row < problem.batch * g.heads * g.rows; ++row) {
      std::memcpy(static_cast<std::byte*>(g.data) + start(g.to, row),
                  static_cast<const std::byte*>(g.buffer.data()) + start(g.from, row),
                  static_cast<std::size_t>(g.columns) * size_of(problem.dtype));
    }
  }
}

TEST(CpuBackward, GradientsMayHaveStridesOfTheirOwn) {
  for (const char* name : {"odd sizes", "lsh, mean", "energy", "softcap, causal, GQA"}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {  // f64: the reference
      Instance instance(test::with_dtype(test::find(name), dtype));
      EXPECT_EQ(test::check_backward(backward_into_other_strides, instance), "")
          << name << ", " << test::name_of(dtype);
    }
  }
}

void backward_without_lse_gradient(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                                   const Execution& execution) {
  BackwardTensors wrong = tensors;
  wrong.d_lse = nullptr;
  backward(problem, grouping, wrong, execution);
}
void backward_by_the_other_estimator(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                                     const Execution& execution) {
  Grouping wrong = grouping;
  wrong.estimator = Estimator::sample;
  backward(problem, wrong, tensors, execution);
}
void backward_less_one_key(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
                           const Execution& execution) {
  Problem wrong = problem;
  wrong.seq_k -= 1;
  backward(wrong, grouping, tensors, execution);
}

TEST(Suite, CatchesWrongBackwards) {
  const std::pair<test::Backward, const char*> wrong_kernels[] = {{backward_without_lse_gradient, "odd sizes"},
                                                                  {backward_by_the_other_estimator, "lsh, mean"},
                                                                  {backward_less_one_key, "odd sizes"}};
  for (const auto& [wrong, name] : wrong_kernels) {
    Instance instance(test::with_dtype(test::find(name), DType::f32));
    EXPECT_NE(test::check_backward(wrong, instance), "") << name;
  }
}

}  // namespace
}  // namespace distr
