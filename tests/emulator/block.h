// SPDX-License-Identifier: Apache-2.0
// A thread block that runs: its threads are fibers, and the order in which they go on is random. Whatever waits says
// what it waits for, so that a deadlock can be told.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator/fiber.h"
#include "emulator/launch.h"
#include "emulator/random.h"

namespace distr::emulator {

inline constexpr std::uint32_t kAllLanes = ~0U;

struct Thread {
  int index = 0;
  int warp = 0, lane = 0;
  Fiber fiber;
  bool exited = false;
  const void* waits_on = nullptr;  // null: it can go on
  const char* waits_for = "";      // in words, with a number
  std::uint64_t waits_value = 0;

  // The proxy fences it has executed: what it stored before the last is visible to asynchronous reads.
  std::uint32_t proxy_fences = 1;
  // cp.async: what is not yet committed, and the groups that are.
  std::vector<std::function<void()>> copies;
  std::deque<std::vector<std::function<void()>>> copy_groups;
  // Bulk copies out of shared memory: the groups, oldest first; of each operation its number.
  std::vector<std::uint64_t> stores;
  std::deque<std::vector<std::uint64_t>> store_groups;
};

// A collective of lanes that is gathering.
struct Gathering {
  const char* name = nullptr;
  std::uint32_t mask = 0, arrived = 0;
  void* data[32] = {};
};

struct Warp {
  std::uint32_t lanes = 0;     // that exist
  std::uint32_t runnable = 0;  // lanes
  int weight = 1;              // how often it is chosen
  Gathering gatherings[32];    // by the lowest lane of the mask
  int registers = 0;           // of a thread
};

// A transfer by the copy engine, which completes at a time of its own. A copy out of shared memory has two parts, and
// the second is what `read` leaves.
struct Transfer {
  std::uint64_t number = 0;
  std::string what;
  std::function<void()> read;  // may be null: done
  std::function<void()> write;
};

struct MemoryBarrier {
  std::uint32_t count = 0, pending = 0;
  std::int64_t bytes = 0;
  unsigned phase = 0;
};

struct NamedBarrier {
  std::uint32_t expected = 0, arrived = 0;
  std::uint64_t phase = 0;
  bool result[2] = {};  // of the vote in a phase
};

struct WarpgroupProducts;

class Block {
 public:
  Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  // Runs block number `index` of the launch to its end. What a thread did wrong, in words; empty: nothing.
  [[nodiscard]] std::string run(const Launch& of_launch, std::uint64_t index);

  // For the threads:
  [[nodiscard]] Thread& thread() { return *current_; }
  [[nodiscard]] Warp& warp() { return warps_[static_cast<std::size_t>(current_->warp)]; }
  [[noreturn]] void fail(const std::string& why);
  // Until wake(key); the caller looks again whether it may go on.
  void sleep(const void* key, const char* what, std::uint64_t value);
  void wake(const void* key);
  // Lets others go first, perhaps.
  void yield();
  // Until something else has happened, perhaps in another block.
  void poll();
  // The lanes of `mask` meet; the last calls act(data, mask).
  template <class Data>
  void meet(const char* name, std::uint32_t mask, Data& data, void (*act)(Data* const (&)[32], std::uint32_t)) {
    if (Gathering* const all = arrive(name, mask, &data)) {
      act(reinterpret_cast<Data* const(&)[32]>(all->data), all->mask);
      leave(*all);
    }
  }

  void begin_transfer(Transfer transfer);
  // Whether nothing of it is left, or (`reads`) nothing to be read.
  [[nodiscard]] bool is_done(std::uint64_t number, bool reads) const;
  // Completes transfers of this one's number, one part at least.
  void advance(std::uint64_t number, bool reads);
  std::uint64_t next_transfer() { return ++transfers_begun_; }

  MemoryBarrier& barrier(std::uint32_t address, const char* user);
  std::map<std::uint32_t, MemoryBarrier>& barriers() { return barriers_; }
  NamedBarrier named[16];
  bool has_waited = false;                                     // for the kernels before this one
  std::map<int, std::unique_ptr<WarpgroupProducts>> products;  // by warpgroup

  [[nodiscard]] const Launch& launch() const { return *launch_; }
  [[nodiscard]] Random& random() { return random_; }
  [[nodiscard]] int threads_left() const { return left_; }
  [[nodiscard]] std::vector<Warp>& warps() { return warps_; }
  [[nodiscard]] Thread& thread(int index) { return *threads_[static_cast<std::size_t>(index)]; }

 private:
  static void run_thread();

  void start(const Launch& of_launch, std::uint64_t index);
  Gathering* arrive(const char* name, std::uint32_t mask, void* data);
  void leave(Gathering& all);
  void go_on();
  Thread* choose();
  bool complete_one();
  void check_end();
  bool wake_polling();
  bool others_run();
  [[nodiscard]] std::string where() const;
  [[nodiscard]] std::string deadlock() const;
  void enter(Thread& next);

  const Launch* launch_ = nullptr;
  std::uint64_t index_ = 0;
  Random random_;
  Fiber home_;
  std::vector<std::unique_ptr<Thread>> threads_;  // all that there ever were
  int count_ = 0;
  std::vector<Warp> warps_;
  Thread* current_ = nullptr;
  int left_ = 0;
  bool late_ = false;          // transfers complete only when nothing else can happen
  bool is_abandoned_ = false;  // another block has failed
  std::uint64_t transfers_begun_ = 0;
  std::vector<Transfer> transfers_;
  std::map<std::uint32_t, MemoryBarrier> barriers_;
  std::string fault_;
};

// The block of the calling thread of the system.
[[nodiscard]] Block& block();

}  // namespace distr::emulator
