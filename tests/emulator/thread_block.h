// SPDX-License-Identifier: Apache-2.0
// A running thread block. Its threads are fibers, which are scheduled in random order. A thread that waits says what it
// waits for, so that a deadlock can be reported.
#pragma once

#include <array>
#include <bit>
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

// Of 16 bytes into shared memory.
struct AsyncCopy {
  std::uint32_t shared = 0;
  const void* global = nullptr;  // null: zeros are stored
};

// What every switch needs comes first: the threads of a warp, in whose turns most switches are, then fit into the
// cache.
struct alignas(64) Thread {
  int index = 0;
  int warp = 0, lane = 0;
  uint3 place{};               // threadIdx
  const char* waits_for = "";  // what it waits for, in words, with a number
  std::uint64_t waits_value = 0;
  Fiber fiber;
  bool exited = false;

  // How many proxy fences it has executed. Asynchronous reads see what it stored before the last one.
  std::uint32_t proxy_fences = 1;
  // cp.async: the copies that are not done, oldest first, and where each committed group of them ends.
  std::vector<AsyncCopy> copies;
  std::vector<std::size_t> copy_groups;
  // Bulk copies out of shared memory, by their numbers: those not committed yet, and the groups, oldest first.
  std::vector<std::uint64_t> stores;
  std::deque<std::vector<std::uint64_t>> store_groups;
};

// A collective operation for which lanes are arriving.
struct Rendezvous {
  const char* name = nullptr;
  std::uint32_t mask = 0, arrived = 0;
  void* data[32] = {};
};

struct Warp {
  std::uint32_t lanes = 0;     // the lanes that exist
  std::uint32_t runnable = 0;  // the lanes that can run
  int weight = 1;              // how often the scheduler takes it
  Rendezvous rendezvous[32];   // by the lowest lane of the mask
  int registers = 0;           // of each thread
};

// An asynchronous copy, which completes at a random time. A copy out of shared memory has two parts: `read` takes the
// bytes from shared memory, and `write` stores them.
struct Transfer {
  std::uint64_t number = 0;
  std::string what;
  std::function<void()> read;  // null: there is nothing left to read
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
  unsigned result[2] = {};  // how many threads hold something, by the phase's parity
};

struct WarpgroupProducts;

class ThreadBlock {
 public:
  ThreadBlock();
  ThreadBlock(const ThreadBlock&) = delete;
  ThreadBlock& operator=(const ThreadBlock&) = delete;
  ~ThreadBlock();

  // Runs block number `index` of the launch to its end. Returns what a thread did wrong, in words, or "".
  [[nodiscard]] std::string run(const Launch& of_launch, std::uint64_t index);

  // The functions below are for the threads of the block.
  [[nodiscard]] Thread& thread() { return *current_; }
  [[nodiscard]] Warp& warp() { return warps_[static_cast<std::size_t>(current_->warp)]; }
  [[noreturn]] void fail(const std::string& why);
  // Blocks the thread until wake(key). The caller then checks its condition again.
  void sleep(const void* key, const char* what, std::uint64_t value);
  void wake(const void* key);
  // Gives other threads a chance to run first.
  void yield();
  // Blocks the thread until something else has happened, perhaps in another block.
  void poll();
  // Waits until all lanes of `mask` have called it. The last one calls act(data, mask).
  template <class Data>
  void meet(const char* name, std::uint32_t mask, Data& data, void (*act)(Data* const (&)[32], std::uint32_t)) {
    if (Rendezvous* const all = arrive(name, mask, &data)) {
      act(reinterpret_cast<Data* const(&)[32]>(all->data), all->mask);
      warp().runnable |= all->mask;
      all->arrived = 0;
    }
  }

  void begin_transfer(Transfer transfer);
  // Whether the transfer is complete, or with `reads` whether it has read shared memory.
  [[nodiscard]] bool is_done(std::uint64_t number, bool reads) const;
  // Completes at least one part of the transfer.
  void advance(std::uint64_t number, bool reads);
  std::uint64_t next_transfer() { return ++transfers_begun_; }

  MemoryBarrier& barrier(std::uint32_t address, const char* user);
  std::map<std::uint32_t, MemoryBarrier>& barriers() { return barriers_; }
  NamedBarrier named[16];
  bool has_waited = false;                                     // whether a thread waited for the kernels before
  std::array<std::unique_ptr<WarpgroupProducts>, 8> products;  // by warpgroup; null: it has had none

  [[nodiscard]] const Launch& launch() const { return *launch_; }
  [[nodiscard]] Random& random() { return random_; }
  [[nodiscard]] int threads_left() const { return left_; }
  [[nodiscard]] std::vector<Warp>& warps() { return warps_; }
  [[nodiscard]] Thread& thread(int index) { return *threads_[static_cast<std::size_t>(index)]; }

 private:
  static void run_thread();

  void start(const Launch& of_launch, std::uint64_t index);
  Rendezvous* arrive(const char* name, std::uint32_t mask, void* data);
  [[noreturn]] void fail_arrival(const char* name, const Rendezvous* others);
  // Blocks the thread until something makes it runnable.
  void wait(const char* what, std::uint64_t value);
  void go_on();
  Thread* choose();
  Thread* choose_rarely(std::uint64_t draw);
  Thread* choose_lane(int of_warp, std::uint64_t draw);
  [[nodiscard]] bool leaves_warp(std::uint64_t draw);
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
  int starved_ = -1;  // a warp that goes on where no other can, in half of the blocks: it finds barriers far ahead
  Fiber home_;
  std::vector<std::unique_ptr<Thread>> threads_;  // those of earlier blocks are kept for reuse
  int count_ = 0;
  std::vector<const void*> waits_on_;  // what each thread waits for; null: it can run
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

// Null, or for the last lane where they meet.
inline Rendezvous* ThreadBlock::arrive(const char* name, std::uint32_t mask, void* data) {
  const int lane = thread().lane;
  Warp& own = warp();
  mask &= own.lanes;
  if ((mask >> lane & 1) == 0) {
    fail_arrival(name, nullptr);
  }
  Rendezvous& all = own.rendezvous[std::countr_zero(mask)];
  if (all.arrived == 0) {
    all.name = name;
    all.mask = mask;
  } else if (all.name != name || all.mask != mask) {
    fail_arrival(name, &all);
  }
  all.data[lane] = data;
  all.arrived |= 1U << lane;
  if (all.arrived == mask) {
    return &all;
  }
  wait(name, mask);
  return nullptr;
}

// The thread block that the calling system thread runs: the one that it has made.
extern thread_local constinit ThreadBlock* running_block;
[[nodiscard]] inline ThreadBlock& thread_block() { return *running_block; }

}  // namespace distr::emulator
