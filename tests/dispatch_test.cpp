// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "distr/attention.h"
#include "distr/version.h"
#include "support/cases.h"
#include "support/failure.h"

namespace distr {
namespace {

Problem problem_of(std::int64_t seq, DType dtype = DType::f32, std::int64_t head_dim = 4) {
  Problem problem;
  problem.dtype = dtype;
  problem.seq_q = problem.seq_k = seq;
  problem.head_dim = problem.head_dim_v = head_dim;
  return contiguous(problem);
}

Grouping grouping_of(Strategy strategy, std::int64_t group_size = 2) {
  Grouping grouping;
  grouping.strategy = strategy;
  grouping.group_size = group_size;
  return grouping;
}

using test::failure;

// A call's tensors of problem_of(2) at G = 2.
struct Call {
  std::vector<float> q = std::vector<float>(8, 1), o = std::vector<float>(8, 7);
  std::vector<std::int32_t> order{0, 1, 2, 3};
  ForwardTensors tensors() { return {q.data(), q.data(), q.data(), nullptr, order.data(), o.data(), nullptr}; }
};

TEST(List, NamesEveryKernelOnce) {
  std::vector<std::string> names;
  for (const KernelInfo& kernel : list()) {
    names.push_back(kernel.name);
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
  for (const char* name : {"cpu/forward", "cpu/grouping", "reference/forward", "reference/backward"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
}

TEST(Explain, SaysWhyAKernelDoesNotServe) {
  const auto f64 = explain(Operation::forward, problem_of(8, DType::f64), grouping_of(Strategy::lsh));
  EXPECT_EQ(f64.kernel, "reference/forward");
  const auto reason = [](const Explanation& found, std::size_t n, const char* kernel) {
    EXPECT_EQ(found.verdicts.at(n).kernel.name, kernel);
    return found.verdicts.at(n).reason;
  };
  EXPECT_EQ(reason(f64, 0, "cpu/forward_bf16"), "is for bf16");
  EXPECT_EQ(reason(f64, 1, "cpu/forward"), "computes in fp32; f64 is for the reference");
  EXPECT_EQ(explain(Operation::forward, problem_of(8), grouping_of(Strategy::lsh)).kernel, "cpu/forward");
}

// DISTR_DISABLE_KERNELS, or its old name, for as long as this lives.
struct Environment {
  explicit Environment(const char* names, const char* name = "DISTR_DISABLE_KERNELS") { setenv(name, names, 1); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() { unsetenv("DISTR_DISABLE_KERNELS"), unsetenv("DISTR_LEAVE_OUT"); }
};

TEST(DisableKernels, TakesTheNextKernel) {
  const auto kernel = [] {
    return explain(Operation::forward, problem_of(8), grouping_of(Strategy::lsh), Device::cpu).kernel;
  };
  ASSERT_EQ(kernel(), "cpu/forward");
  {
    const Environment environment("cpu/");
    EXPECT_EQ(kernel(), "reference/forward");
    const auto verdicts = explain(Operation::forward, problem_of(8), grouping_of(Strategy::lsh)).verdicts;
    EXPECT_EQ(verdicts.at(1).kernel.name, "cpu/forward");
    EXPECT_EQ(verdicts.at(1).reason, "is disabled by DISTR_DISABLE_KERNELS");
  }
  EXPECT_EQ(kernel(), "cpu/forward");
  EXPECT_EQ((Environment("cpu/", "DISTR_LEAVE_OUT"), kernel()), "reference/forward");
  const Environment environment("cpu/backward,reference/forward");
  EXPECT_EQ(kernel(), "cpu/forward");
}

TEST(DisableKernels, MayLeaveNothing) {
  const Environment environment("cpu/,reference/");
  Call call;
  const auto [status, message] = failure([&] { forward(problem_of(2), grouping_of(Strategy::lsh), call.tensors()); });
  EXPECT_EQ(status, Status::unsupported);
  EXPECT_NE(message.find("cpu/forward: is disabled by DISTR_DISABLE_KERNELS"), std::string::npos) << message;
  EXPECT_EQ(call.o, std::vector<float>(8, 7));
}

TEST(DisableKernels, RefusesWhatIsNoKernel) {
  for (const char* names : {"cpu/,sm70/", ",cpu/", "cpu/,", "cpu/forwards"}) {
    const Environment environment(names);
    const auto [status, message] =
        failure([] { (void)explain(Operation::forward, problem_of(8), grouping_of(Strategy::lsh)); });
    EXPECT_EQ(status, Status::invalid_argument) << names;
    EXPECT_NE(message.find("beginnings of the names of this build's kernels"), std::string::npos) << message;
  }
}

TEST(Call, CudaIsRefusedWithTheReason) {
  const auto [status, message] = failure([] {
    Execution execution;
    execution.device = Device::cuda;
    forward(problem_of(2), grouping_of(Strategy::exact), Call().tensors(), execution);
  });
  EXPECT_EQ(status, Status::unsupported);
  EXPECT_EQ(message, "no kernel on cuda serves this problem; this build has no CUDA kernels");
}

TEST(Call, NullTensorsAreNamed) {
  const auto with = [](auto change) {
    return failure([&] {
             Call call;
             ForwardTensors tensors = call.tensors();
             change(tensors);
             forward(problem_of(2), grouping_of(Strategy::lsh), tensors);
           })
        .second;
  };
  const std::string rest = " is null; allowed: memory of the problem's sizes";
  EXPECT_EQ(with([](ForwardTensors& t) { t.q = nullptr; }), "Q" + rest);
  EXPECT_EQ(with([](ForwardTensors& t) { t.k = nullptr; }), "K" + rest);
  EXPECT_EQ(with([](ForwardTensors& t) { t.v = nullptr; }), "V" + rest);
  EXPECT_EQ(with([](ForwardTensors& t) { t.o = nullptr; }), "O" + rest);
  EXPECT_EQ(with([](ForwardTensors& t) { t.order = nullptr; }), "the order" + rest);
}

TEST(Call, OrdersThatAreNoPermutationAreRefusedAndOutputsUntouched) {
  for (const std::vector<std::int32_t>& order :
       {std::vector<std::int32_t>{0, 1, 2, 4}, {0, 1, 2, -1}, {0, 1, 1, 3}, {0, 1, 2, 1 << 30}}) {
    Call call;
    call.order = order;
    const auto [status, message] =
        failure([&] { forward(problem_of(2), grouping_of(Strategy::energy), call.tensors()); });
    EXPECT_EQ(status, Status::invalid_argument);
    EXPECT_EQ(message.rfind("row 0 of the order is no permutation: it has ", 0), 0U) << message;
    EXPECT_EQ(call.o, std::vector<float>(8, 7));
  }
}

TEST(Call, WorkspaceMayBeTheCallers) {
  const Problem problem = problem_of(2);
  const Grouping grouping = grouping_of(Strategy::exact);
  Execution execution;
  execution.threads = 2;
  const std::size_t needed = workspace_bytes(Operation::forward, problem, grouping, execution);
  ASSERT_GT(needed, 0U);
  test::Buffer memory(static_cast<std::int64_t>(needed / sizeof(float)), DType::f32);
  execution.workspace = memory.data();
  execution.workspace_bytes = needed - 1;
  Call call;
  EXPECT_EQ(failure([&] { forward(problem, grouping, call.tensors(), execution); }).first, Status::out_of_memory);
}

// No call writes beside the workspace that it asked for, whatever is in it before.
TEST(Call, StaysWithinItsWorkspace) {
  std::vector<test::Case> all = test::cases();
  all.insert(all.end(), test::near_cases().begin(), test::near_cases().end());
  // Sanitizers, which see more than canaries do and slow every call, see one number of threads.
  const std::vector<int> thread_counts = DISTR_SANITIZED != 0 ? std::vector{3} : std::vector{1, 3, 1000};
  for (const test::Case& original : all) {
    test::Instance instance(test::with_dtype(original, DType::f32));
    for (const int threads : thread_counts) {
      SCOPED_TRACE(original.name + ", " + std::to_string(threads) + " threads");
      instance.o = instance.output();
      instance.lse = instance.lse_output();
      const Problem& problem = original.problem;
      const Grouping& grouping = original.grouping;
      Execution execution;
      execution.threads = threads;
      const auto with_workspace = [&](Operation operation) {
        execution.workspace_bytes = workspace_bytes(operation, problem, grouping, execution);
        return test::Buffer(static_cast<std::int64_t>(execution.workspace_bytes / sizeof(float)), DType::f32);
      };
      if (test::makes_order(grouping) || needs_key_means(grouping)) {
        test::Buffer memory = with_workspace(Operation::grouping);
        execution.workspace = memory.data();
        std::vector<std::int32_t> order(instance.order.size());
        std::vector<float> means(instance.key_means.size());
        make_grouping(problem, grouping, {instance.q_data(), instance.k_data(), order.data(), means.data()}, execution);
        EXPECT_TRUE(memory.canaries_intact());
      }
      test::Buffer memory = with_workspace(Operation::forward);
      execution.workspace = memory.data();
      forward(problem, grouping, instance.forward(), execution);
      EXPECT_TRUE(memory.canaries_intact());
      test::Buffer o = instance.output();
      test::Buffer lse = instance.lse_output();
      forward(problem, grouping, instance.forward_into(o, lse));
      EXPECT_TRUE(o == instance.o && lse == instance.lse);
    }
  }
}

TEST(Call, AutomaticGivesTheBitsOfWhatExplainNames) {
  for (const std::int64_t seq : {64, 2100}) {
    test::Case test_case;
    test_case.problem.seq_q = test_case.problem.seq_k = seq;
    test_case.problem.head_dim = test_case.problem.head_dim_v = 64;
    test_case.problem = contiguous(test_case.problem);
    test_case.grouping.strategy = Strategy::automatic;
    const Problem& problem = test_case.problem;
    const Grouping named = explain(Operation::forward, problem, test_case.grouping).grouping;
    EXPECT_EQ(named.strategy, seq == 64 ? Strategy::exact : Strategy::energy);
    test_case.grouping = named;
    test::Instance instance(test_case);
    Grouping automatic = named;
    automatic.strategy = Strategy::automatic;
    std::vector<std::int32_t> order(instance.order.size());
    make_grouping(problem, named, {instance.q_data(), instance.k_data(), instance.order.data()});
    make_grouping(problem, automatic, {instance.q_data(), instance.k_data(), order.data()});
    EXPECT_EQ(order, instance.order);
    forward(problem, named, instance.forward());
    test::Buffer o = instance.output();
    test::Buffer lse = instance.lse_output();
    forward(problem, automatic, instance.forward_into(o, lse));
    EXPECT_TRUE(o == instance.o && lse == instance.lse);
  }
}

TEST(Call, OutputsWhoseElementsOverlapAreRefused) {
  Call call;
  Problem problem = problem_of(2);
  problem.o.row = 3;
  EXPECT_EQ(failure([&] { forward(problem, grouping_of(Strategy::exact), call.tensors()); }).second,
            "the strides of O are 8, 8, 3 and elements overlap; allowed: strides that keep all elements apart, as "
            "contiguous() sets them");
  EXPECT_EQ(call.o, std::vector<float>(8, 7));
  problem = problem_of(2);
  problem.o.row = -4;  // upwards is fine
  ForwardTensors tensors = call.tensors();
  tensors.o = call.o.data() + 4;
  forward(problem, grouping_of(Strategy::exact), tensors);
  EXPECT_EQ(call.o, std::vector<float>(8, 1));

  Problem expanded = problem_of(2);  // one K for two batches: its gradient has nowhere to go
  expanded.batch = 2;
  expanded.k.batch = 0;
  std::vector<float> x(16);
  const BackwardTensors backward_tensors{x.data(), x.data(), x.data(), nullptr,  nullptr,  x.data(), x.data(),
                                         x.data(), nullptr,  x.data(), x.data(), x.data(), nullptr};
  EXPECT_EQ(failure([&] {
              backward(expanded, grouping_of(Strategy::exact), backward_tensors);
            }).second.rfind("the strides of dK are 0, 8, 4", 0),
            0U);
}

TEST(Call, EmptyProblemsTakeNoTime) {
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh, Strategy::energy}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      Problem problem = problem_of(0, dtype);
      problem.batch = std::int64_t{1} << 40;
      make_grouping(problem, grouping_of(strategy), {});
      forward(problem, grouping_of(strategy), {});
      backward(problem, grouping_of(strategy), {});
    }
  }
}

// On the CPU there is nothing to choose: every kernel gives the same bits in every run.
TEST(Call, OrdersOfSummationAreForCuda) {
  const test::Case& test_case = test::find("GQA");
  const Problem& problem = test_case.problem;
  test::Instance instance(test_case);
  forward(problem, test_case.grouping, instance.forward());
  const auto dq = [&](bool deterministic) {
    Execution execution;
    execution.deterministic = deterministic;
    test::Buffer d_q(instance.q.count(), problem.dtype);
    test::Buffer d_k(instance.k.count(), problem.dtype);
    test::Buffer d_v(instance.v.count(), problem.dtype);
    BackwardTensors tensors{instance.q_data(),     instance.k_data(), instance.v_data(),   nullptr,
                            instance.order.data(), instance.o.data(), instance.lse.data(), instance.o.data()};
    tensors.d_q = d_q.data();
    tensors.d_k = d_k.data();
    tensors.d_v = d_v.data();
    backward(problem, test_case.grouping, tensors, execution);
    return d_q;
  };
  EXPECT_TRUE(dq(false) == dq(true));
  for (const KernelInfo& kernel : list()) {
    EXPECT_EQ(kernel.deterministic, !kernel.name.ends_with("/backward_atomics")) << kernel.name;
    EXPECT_TRUE(kernel.deterministic || (kernel.operation == Operation::backward && kernel.device == Device::cuda));
  }
  for (const bool deterministic : {false, true}) {
    EXPECT_EQ(explain(Operation::backward, problem, test_case.grouping, Device::cpu, deterministic).kernel,
              "cpu/backward");
  }
}

TEST(Call, NegativeThreadsAreRefused) {
  Execution execution;
  execution.threads = -1;
  EXPECT_EQ(failure([&] { forward(problem_of(2), grouping_of(Strategy::exact), Call().tensors(), execution); }).second,
            "threads is -1; allowed: 0 (all processors) and above");
}

TEST(Call, AGradientOfABooleanMaskIsRefused) {
  Problem problem = problem_of(2);
  problem.mask.kind = MaskKind::boolean;
  Call call;
  std::vector<float> x(8);
  const std::uint8_t keep = 1;
  const BackwardTensors tensors{x.data(), x.data(), x.data(), &keep,    nullptr,  x.data(), x.data(),
                                x.data(), nullptr,  x.data(), x.data(), x.data(), x.data()};
  EXPECT_EQ(failure([&] { backward(problem, grouping_of(Strategy::exact), tensors); }).second,
            "the mask's gradient is wanted, but the mask is not additive; allowed: null, or an additive mask");
}

TEST(Version, IsThatOfTheHeaders) {
  EXPECT_EQ(std::string(version()), std::to_string(DISTR_VERSION_MAJOR) + "." + std::to_string(DISTR_VERSION_MINOR) +
                                        "." + std::to_string(DISTR_VERSION_PATCH));
}

}  // namespace
}  // namespace distr
