// SPDX-License-Identifier: Apache-2.0
// Each active block has its own system thread, because shared memory is thread_local. Only the thread whose turn it is
// runs, so that the run depends on the seed alone.
#include "emulator/launch.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "distr/error.h"
#include "emulator/device_index.h"
#include "emulator/random.h"
#include "emulator/thread_block.h"

thread_local constinit uint3 threadIdx{};
thread_local constinit uint3 blockIdx{};
thread_local constinit dim3 blockDim{};
thread_local constinit dim3 gridDim{};

namespace distr::emulator {
namespace {

std::uint64_t number(const char* name, std::uint64_t absent) {
  const char* const text = std::getenv(name);
  return text == nullptr ? absent : std::strtoull(text, nullptr, 10);
}

std::atomic<std::uint64_t> seed = number("DISTR_EMULATOR_SEED", 1) << 32;
std::atomic<int> max_resident_ctas = static_cast<int>(number("DISTR_EMULATOR_BLOCKS", 3));

// A system thread, which runs blocks of the current launch when it has its turn.
struct Worker {
  std::binary_semaphore turn{0};
  bool active = false;
};

thread_local Worker* self = nullptr;

// The workers and their state, which only the worker whose turn it is touches.
class Pool {
 public:
  // Returns why the launch failed, or "".
  std::string run(const Launch& launch) {
    launch_ = &launch;
    next_ = 0;
    blocks_ = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    fault_.clear();
    random_ = Random(launch.seed);
    idle_turns_ = 0;
    const auto most = static_cast<std::uint64_t>(max_resident_ctas.load());
    const std::size_t count = static_cast<std::size_t>(std::min(blocks_, std::max<std::uint64_t>(most, 1)));
    while (workers_.size() < count) {
      Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
      std::thread([this, &worker] { work(worker); }).detach();
    }
    for (std::size_t n = 0; n < count; ++n) {
      workers_[n]->active = true;
    }
    if (count > 0) {
      workers_.front()->turn.release();
      done_.acquire();
    }
    return fault_;
  }

  bool let_other_run() {
    if (Worker* const other = choose(self)) {
      other->turn.release();
      self->turn.acquire();
    }
    return fault_.empty();
  }

  int& idle_turns() { return idle_turns_; }

 private:
  [[noreturn]] void work(Worker& own) {
    self = &own;
    ThreadBlock block;
    while (true) {
      own.turn.acquire();
      while (next_ < blocks_ && fault_.empty()) {
        const std::string fault = block.run(*launch_, next_++);
        idle_turns_ = 0;
        if (fault_.empty()) {
          fault_ = fault;
        }
      }
      own.active = false;
      Worker* const other = choose(&own);
      (other != nullptr ? other->turn : done_).release();
    }
  }

  // One of the other active workers; null if there is none.
  Worker* choose(const Worker* but) {
    std::vector<Worker*> all;
    for (const auto& worker : workers_) {
      if (worker->active && worker.get() != but) {
        all.push_back(worker.get());
      }
    }
    return all.empty() ? nullptr : all[static_cast<std::size_t>(random_.below(static_cast<int>(all.size())))];
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  std::binary_semaphore done_{0};
  const Launch* launch_ = nullptr;
  std::uint64_t next_ = 0, blocks_ = 0;
  std::string fault_;
  Random random_;
  int idle_turns_ = 0;
};

Pool& pool() {
  static Pool& only = *new Pool;  // its threads never end
  return only;
}

}  // namespace

void set_seed(std::uint64_t wanted) { seed = wanted << 32; }
void set_max_resident_ctas(int blocks) { max_resident_ctas = blocks; }
bool let_other_block_run() { return pool().let_other_run(); }
int& idle_turns() { return pool().idle_turns(); }

void run_grid(Launch launch) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  launch.seed = ++seed;
  const std::string fault = pool().run(launch);
  if (!fault.empty()) {
    throw Error(Status::device_failure, fault + " (seed " + std::to_string(launch.seed >> 32) + ", launch " +
                                            std::to_string(launch.seed & 0xFFFFFFFF) + ")");
  }
}

}  // namespace distr::emulator

[[noreturn]] void __trap() { distr::emulator::thread_block().fail("trap"); }
