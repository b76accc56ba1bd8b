// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace distr::common {
namespace {

// Threads live for one call. They cost about 20 microseconds each, and leave no state behind that a fork, an unloading
// library or another runtime's pool could trip over.
void run_on_own_threads(int threads, const std::function<void(int)>& body) {
  std::vector<std::thread> others;
  others.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int thread = 1; thread < threads; ++thread) {
      others.emplace_back(body, thread);
    }
  } catch (...) {
    // The system has no more threads or memory, so the threads that did start share the work with this one.
  }
  body(0);
  for (std::thread& other : others) {
    other.join();
  }
}

}  // namespace

int available_processors() noexcept {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1, CPU_COUNT(&set));
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(const Execution& execution, std::int64_t tasks,
                  const std::function<void(std::int64_t task, int thread)>& body) {
  std::atomic<std::int64_t> next = 0;
  std::atomic<std::int64_t> done = 0;
  std::atomic<bool> failed = false;
  std::exception_ptr failure;
  std::mutex failure_lock;
  const auto work = [&](int thread) {
    try {
      while (!failed.load(std::memory_order_relaxed)) {
        const std::int64_t task = next.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks) {
          return;
        }
        body(task, thread);
        const std::int64_t done_now = done.fetch_add(1, std::memory_order_relaxed) + 1;
        if (thread == 0 && execution.progress) {
          execution.progress(done_now, tasks);
        }
      }
    } catch (...) {
      const std::scoped_lock lock(failure_lock);
      failed = true;
      failure = std::current_exception();
    }
  };
  const int threads = static_cast<int>(std::min<std::int64_t>(execution.threads, tasks));
  if (threads <= 1) {
    work(0);
  } else if (execution.parallel) {
    execution.parallel(threads, work);
  } else {
    run_on_own_threads(threads, work);
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace distr::common
