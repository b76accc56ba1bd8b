// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace distr::common {
namespace {

Execution with_threads(int threads) {
  Execution execution;
  execution.threads = threads;
  return execution;
}

TEST(ParallelFor, RunsEveryTaskOnceOnAKnownThread) {
  for (const int threads : {1, 2, 5}) {
    std::vector<std::atomic<int>> runs(1000);
    parallel_for(with_threads(threads), 1000, [&](std::int64_t task, int thread) {
      EXPECT_TRUE(thread >= 0 && thread < threads) << thread;
      ++runs[static_cast<std::size_t>(task)];
    });
    for (const auto& count : runs) {
      ASSERT_EQ(count, 1);
    }
  }
}

TEST(ParallelFor, NoTasks) {
  parallel_for(with_threads(3), 0, [](std::int64_t, int) { FAIL(); });
}

TEST(ParallelFor, RethrowsWhatATaskThrew) {
  EXPECT_THROW(parallel_for(with_threads(3), 100,
                            [](std::int64_t task, int) {
                              if (task == 50) {
                                throw std::runtime_error("task 50");
                              }
                            }),
               std::runtime_error);
}

TEST(ParallelFor, UsesTheCallersThreads) {
  Execution execution = with_threads(4);
  int calls = 0;
  execution.parallel = [&](int threads, const std::function<void(int)>& body) {
    calls += threads;
    body(2);  // one thread can do all the work
  };
  std::atomic<int> tasks = 0;
  parallel_for(execution, 10, [&](std::int64_t, int thread) {
    EXPECT_EQ(thread, 2);
    ++tasks;
  });
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(tasks, 10);
}

TEST(ParallelFor, TellsItsProgressUpToTheEnd) {
  Execution execution = with_threads(1);
  std::vector<std::int64_t> seen;
  execution.progress = [&](std::int64_t done, std::int64_t total) {
    EXPECT_EQ(total, 3);
    seen.push_back(done);
  };
  parallel_for(execution, 3, [](std::int64_t, int) {});
  EXPECT_EQ(seen, (std::vector<std::int64_t>{1, 2, 3}));
}

}  // namespace
}  // namespace distr::common
