// SPDX-License-Identifier: Apache-2.0
#include "distr/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "support/cases.h"
#include "support/failure.h"

namespace distr {
namespace {

using test::failure;

Decisions since(const Decisions& before) {
  const Decisions now = decisions();
  return {now.validated - before.validated, now.resolved - before.resolved, now.chosen - before.chosen};
}

TEST(Plan, IsWhatExplainSays) {
  for (const test::Case& test_case : test::cases()) {
    SCOPED_TRACE(test_case.name);
    for (const Operation operation : {Operation::grouping, Operation::forward, Operation::backward}) {
      if (operation == Operation::grouping && !test::makes_order(test_case.grouping)) {
        continue;
      }
      const Plan made = plan(operation, test_case.problem, test_case.grouping);
      const Explanation found = explain(operation, test_case.problem, test_case.grouping);
      EXPECT_EQ(made.operation(), operation);
      EXPECT_EQ(made.kernel().name, found.kernel);
      EXPECT_EQ(made.choice(), found.choice);
      EXPECT_EQ(made.grouping().strategy, found.grouping.strategy);
      EXPECT_EQ(made.workspace_bytes(), workspace_bytes(operation, test_case.problem, test_case.grouping));
      std::size_t end = 0;
      for (const WorkspacePart& part : made.workspace()) {
        EXPECT_GE(part.offset, end) << part.name;
        end = part.offset + part.bytes;
      }
      EXPECT_LE(end, made.workspace_bytes());
      ASSERT_FALSE(made.launches().empty());
      EXPECT_EQ(made.launches().front().tile, made.tiles().front());
    }
  }
}

TEST(Plan, IsDecidedOnceForACallAndRunDecidesNothing) {
  test::Instance instance(test::with_dtype(test::find("GQA"), DType::f32));
  const Problem& problem = instance.test_case.problem;
  Grouping grouping;
  grouping.strategy = Strategy::automatic;
  grouping.group_size = 2;
  const Decisions start = decisions();
  forward(problem, grouping, instance.forward());
  const Decisions call = since(start);
  EXPECT_EQ(call.validated, 1);
  EXPECT_EQ(call.resolved, 1);
  EXPECT_EQ(call.chosen, 1);

  const Decisions before = decisions();
  const Plan made = plan(Operation::forward, problem, grouping);
  const Plan order = made.for_operation(Operation::grouping);
  for (int n = 0; n < 3; ++n) {
    order.run(GroupingTensors{instance.q_data(), instance.k_data(), instance.order.data()});
    made.run(instance.forward());
  }
  const Decisions both = since(before);
  EXPECT_EQ(both.validated, 1);
  EXPECT_EQ(both.resolved, 1);
  EXPECT_EQ(both.chosen, 2);  // of two operations
}

TEST(Plan, RunsWithTheBitsOfACallAndAnyWorkspace) {
  test::Instance instance(test::with_dtype(test::find("lsh, mean"), DType::f32));
  const Problem& problem = instance.test_case.problem;
  const Grouping& grouping = instance.test_case.grouping;
  forward(problem, grouping, instance.forward());
  const Plan made = plan(Operation::forward, problem, grouping);
  for (int n = 0; n < 2; ++n) {
    test::Buffer o = instance.output();
    test::Buffer lse = instance.lse_output();
    test::Buffer memory(static_cast<std::int64_t>(made.workspace_bytes() / sizeof(float)), DType::f32);
    Execution execution;
    execution.workspace = memory.data();
    execution.workspace_bytes = made.workspace_bytes();
    made.run(instance.forward_into(o, lse), execution);
    EXPECT_TRUE(o == instance.o && lse == instance.lse);
    EXPECT_TRUE(memory.canaries_intact());
    execution.workspace_bytes -= 1;
    EXPECT_EQ(failure([&] { made.run(instance.forward_into(o, lse), execution); }).first, Status::out_of_memory);
  }
}

TEST(Plan, RefusesTensorsOfAnotherOperation) {
  test::Instance instance(test::find("GQA"));
  const Plan made = plan(Operation::grouping, instance.test_case.problem, instance.test_case.grouping);
  const auto [status, message] = failure([&] { made.run(instance.forward()); });
  EXPECT_EQ(status, Status::invalid_argument);
  EXPECT_NE(message.find("not those of the plan's operation"), std::string::npos) << message;
}

TEST(Plan, TakesTheKernelAndTheTileThatAreNamed) {
  const test::Case& test_case = test::find("GQA");
  Execution execution;
  execution.kernel = "reference/forward";
  EXPECT_EQ(plan(Operation::forward, test_case.problem, test_case.grouping, execution).kernel().name,
            "reference/forward");
  execution.kernel = "cpu/forwards";
  EXPECT_EQ(failure([&] { (void)plan(Operation::forward, test_case.problem, test_case.grouping, execution); }).second,
            "kernel is 'cpu/forwards'; allowed: cpu/forward_bf16, cpu/forward, reference/forward");
  execution.kernel = "cpu/forward";
  Problem doubles = test::with_dtype(test_case, DType::f64).problem;
  EXPECT_EQ(failure([&] { (void)plan(Operation::forward, doubles, test_case.grouping, execution); }).second,
            "cpu/forward: computes in fp32; f64 is for the reference");
  execution.tile_rows = 100;
  const Problem floats = test::with_dtype(test_case, DType::f32).problem;
  EXPECT_EQ(failure([&] { (void)plan(Operation::forward, floats, test_case.grouping, execution); }).second,
            "tile_rows is 100; allowed: 0, 128, 256");
  for (const std::int64_t rows : {128, 256}) {
    execution.tile_rows = rows;
    EXPECT_EQ(plan(Operation::forward, floats, test_case.grouping, execution).tiles().front().rows, rows);
  }
}

// A CPU's threads must not go without tasks.
TEST(Plan, GivesATaskOfTheCpuMoreRowsWhereThereAreEnough) {
  Problem problem;
  problem.batch = 4;
  problem.heads_q = problem.heads_kv = 8;
  problem.seq_q = problem.seq_k = 1024;
  problem.head_dim = problem.head_dim_v = 64;
  problem = contiguous(problem);
  const auto rows = [&](int threads) {
    Execution execution;
    execution.threads = threads;
    return plan(Operation::forward, problem, {}, execution).tiles().front().rows;
  };
  EXPECT_EQ(rows(1), 256);
  EXPECT_EQ(rows(32), 256);  // 128 tasks
  EXPECT_EQ(rows(33), 128);
  problem.batch = 1;
  problem.seq_q = 900;
  problem = contiguous(problem);
  EXPECT_EQ(rows(1), 256);
  problem.seq_q = 700;
  problem = contiguous(problem);
  EXPECT_EQ(rows(1), 128);  // 24 tasks of more rows
}

// A kernel that is named is held to what one that is chosen is.
TEST(Plan, RefusesANamedKernelWithTheReason) {
  const test::Case& test_case = test::find("given");
  Execution execution;
  execution.kernel = "cpu/grouping";
  const Problem problem = test::with_dtype(test_case, DType::f32).problem;
  EXPECT_EQ(failure([&] { (void)plan(Operation::grouping, problem, test_case.grouping, execution); }).second,
            "cpu/grouping: has nothing to compute, as the caller brings the order");
}

// One place decides where orders come from, for plan(), explain() and resolve_strategy() alike.
TEST(Plan, TakesOrdersFromTheBlockBeforeInCausalCallsUnlessOwnIsNamed) {
  Problem problem;
  problem.seq_q = problem.seq_k = 4096;
  problem.head_dim = problem.head_dim_v = 64;
  for (const StrategyTraits& strategy : kStrategies) {
    for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      for (const OrderFrom named : {OrderFrom::automatic, OrderFrom::own, OrderFrom::previous}) {
        SCOPED_TRACE(std::string(strategy.name) + ", " + name_in(kOrdersFrom, named));
        problem.causal = causal;
        const Grouping grouping{.strategy = strategy.strategy, .group_size = 2, .order_from = named};
        const bool from_previous = causal != Causal::none && strategy.order == OrderSource::computed;
        const OrderFrom expected = named != OrderFrom::automatic ? named
                                   : from_previous               ? OrderFrom::previous
                                                                 : OrderFrom::own;
        const Plan made = plan(Operation::forward, problem, grouping);
        EXPECT_EQ(made.grouping().order_from, expected);
        EXPECT_EQ(explain(Operation::backward, problem, grouping).grouping, made.grouping());
        EXPECT_EQ(resolve_strategy(problem, grouping, Device::cpu), made.grouping());
        const bool groups = made.grouping().strategy != Strategy::exact;
        const bool was_open = named == OrderFrom::automatic && expected == OrderFrom::previous;
        EXPECT_EQ(made.choice().find("orders come from the block before") != std::string::npos, groups && was_open)
            << made.choice();
      }
    }
  }
}

TEST(Plan, SaysThatACausalPromptOfOneBlockIsExact) {
  Problem problem;
  problem.seq_q = problem.seq_k = 128;
  problem.head_dim = problem.head_dim_v = 64;
  problem.causal = Causal::top_left;
  Grouping grouping{.strategy = Strategy::energy, .group_size = 2, .block = 1000};
  EXPECT_EQ(plan(Operation::forward, problem, grouping).choice(),
            "exact, as the only block has none before it for an order to come from");
  grouping.block = 127;
  EXPECT_EQ(plan(Operation::forward, problem, grouping).choice(),
            "as asked for; orders come from the block before, as the call is causal");
}

TEST(Plan, SaysWhatIsNearAndWhatIsSkipped) {
  Problem problem;
  problem.seq_q = problem.seq_k = 2048;
  problem.head_dim = problem.head_dim_v = 64;
  const auto choice = [&](const Grouping& grouping) { return plan(Operation::forward, problem, grouping).choice(); };
  Grouping grouping{.strategy = Strategy::energy, .group_size = 4, .sinks = 128};
  EXPECT_EQ(choice(grouping), "as asked for; the first 128 keys are exact");
  EXPECT_EQ(choice({.strategy = Strategy::energy, .group_size = 2, .window = 0}),
            "as asked for; near keys, up to 0 from a block's rows, are exact");
  grouping.window = 512;
  const std::string near = "as asked for; near keys, up to 512 from a block's rows and the first 128, are exact";
  EXPECT_EQ(choice(grouping), near);
  grouping.skip = 0.0025;
  const std::string skipped =
      near + "; far keys are skipped, 64 at a time, where none has a probability of 0.0025 beside the near ones";
  EXPECT_EQ(choice(grouping), skipped);
  grouping.finish = true;
  EXPECT_EQ(choice(grouping), skipped + ", and others finished");
  EXPECT_EQ(choice({.strategy = Strategy::exact, .window = 512, .sinks = 128}), "as asked for");
}

// Every row of the table stands where the enumeration has it, under a name of its own.
TEST(Strategies, AreListedInOrder) {
  for (std::size_t n = 0; n < kStrategies.size(); ++n) {
    EXPECT_EQ(kStrategies[n].strategy, static_cast<Strategy>(n));
    EXPECT_EQ(std::count_if(kStrategies.begin(), kStrategies.end(),
                            [n](const auto& entry) { return std::string(entry.name) == kStrategies[n].name; }),
              1);
  }
  for (std::size_t n = 0; n < kEstimators.size(); ++n) EXPECT_EQ(kEstimators[n].value, static_cast<Estimator>(n));
  for (std::size_t n = 0; n < kOrdersFrom.size(); ++n) EXPECT_EQ(kOrdersFrom[n].value, static_cast<OrderFrom>(n));
  for (std::size_t n = 0; n < kOrderSources.size(); ++n) {
    EXPECT_EQ(kOrderSources[n].value, static_cast<OrderSource>(n));
  }
  for (std::size_t n = 0; n < kMembers.size(); ++n) EXPECT_EQ(kMembers[n].value, static_cast<Members>(n));
}

}  // namespace
}  // namespace distr
