// SPDX-License-Identifier: Apache-2.0
#include "emulator/thread_block.h"

#include <algorithm>
#include <bit>

#include "emulator/copies.h"
#include "emulator/device_index.h"
#include "emulator/shared_memory.h"
#include "emulator/warpgroup.h"

namespace distr::emulator {
namespace {

const char kPolling = 0;  // its address is what threads wait on that look at memory again and again

// What a scheduler's random number says.
bool completes(std::uint64_t draw) { return draw % 16 == 0; }  // a transfer
bool changes_warp(std::uint64_t draw) { return (draw >> 4) % 64 == 0; }
bool lets_others_run(std::uint64_t draw) { return (draw >> 10) % 4096 == 0; }  // other blocks
int turn_of_lane(std::uint64_t draw) { return static_cast<int>((draw >> 22) % 32); }

}  // namespace

thread_local constinit ThreadBlock* running_block = nullptr;

ThreadBlock::ThreadBlock() { running_block = this; }
ThreadBlock::~ThreadBlock() { running_block = nullptr; }

std::string ThreadBlock::run(const Launch& of_launch, std::uint64_t index) {
  start(of_launch, index);
  Thread* const first = choose();
  enter(*first);
  home_.switch_to(first->fiber);
  if (fault_.empty() && !is_abandoned_ && !shared_memory().is_intact()) {
    fault_ = where() + "wrote behind its " + std::to_string(of_launch.shared_bytes) + " bytes of shared memory";
  }
  if (fault_.empty() && !is_abandoned_ && of_launch.is_dependent && !has_waited) {
    fault_ = where() + "ends without having waited for the kernels before it, although it may start before they end";
  }
  if (!fault_.empty() || is_abandoned_) {  // its threads are somewhere in the kernel
    for (int n = 0; n < count_; ++n) {
      threads_[static_cast<std::size_t>(n)]->fiber.prepare(&ThreadBlock::run_thread);
    }
  }
  return fault_;
}

void ThreadBlock::start(const Launch& of_launch, std::uint64_t index) {
  launch_ = &of_launch;
  index_ = index;
  random_ = Random(of_launch.seed * 0x10001 + index);
  fault_.clear();
  late_ = random_.below(2) == 0;
  is_abandoned_ = false;
  has_waited = false;
  transfers_.clear();
  barriers_.clear();
  products = {};
  std::fill(std::begin(named), std::end(named), NamedBarrier{});
  count_ = left_ = static_cast<int>(of_launch.threads.x * of_launch.threads.y * of_launch.threads.z);
  while (threads_.size() < static_cast<std::size_t>(count_)) {
    auto& thread = threads_.emplace_back(std::make_unique<Thread>());
    thread->index = static_cast<int>(threads_.size()) - 1;
    thread->warp = thread->index / 32;
    thread->lane = thread->index % 32;
    thread->fiber.prepare(&ThreadBlock::run_thread);
  }
  warps_.assign(static_cast<std::size_t>((count_ + 31) / 32), Warp{});
  waits_on_.assign(static_cast<std::size_t>(count_), nullptr);
  for (int n = 0; n < count_; ++n) {
    Thread& thread = *threads_[static_cast<std::size_t>(n)];
    const dim3& size = of_launch.threads;
    const auto number = static_cast<unsigned>(n);
    thread.place = {number % size.x, number / size.x % size.y, number / size.x / size.y};
    thread.exited = false;
    thread.proxy_fences = 1;
    thread.copies.clear();
    thread.copy_groups.clear();
    thread.stores.clear();
    thread.store_groups.clear();
    warps_[static_cast<std::size_t>(n / 32)].lanes |= 1U << n % 32;
  }
  for (Warp& warp : warps_) {
    warp.runnable = warp.lanes;
    warp.weight = random_.below(3) == 0 ? 1 : 16;
  }
  starved_ = random_.below(2) == 0 ? random_.below(static_cast<int>(warps_.size())) : -1;
  const auto x = static_cast<unsigned>(index % of_launch.grid.x);
  const auto y = static_cast<unsigned>(index / of_launch.grid.x % of_launch.grid.y);
  blockIdx = {x, y, static_cast<unsigned>(index / of_launch.grid.x / of_launch.grid.y)};
  blockDim = of_launch.threads;
  gridDim = of_launch.grid;
  shared_memory().start(of_launch.shared_bytes, random_);
  current_ = threads_.front().get();
}

void ThreadBlock::run_thread() {
  while (true) {
    ThreadBlock& own = thread_block();
    own.launch_->kernel();
    require_no_products();
    copy_async_wait(0);  // what nobody waited for is done at last
    Thread& self = own.thread();
    self.exited = true;
    --own.left_;
    own.warp().runnable &= ~(1U << self.lane);
    if (own.named[0].arrived > 0) {  // perhaps for this thread
      own.wake(&own.named[0]);
    }
    own.go_on();
  }
}

void ThreadBlock::enter(Thread& next) {
  current_ = &next;
  threadIdx = next.place;
}

inline Thread* ThreadBlock::choose_lane(int of_warp, std::uint64_t draw) {
  const std::uint32_t runnable = warps_[static_cast<std::size_t>(of_warp)].runnable;
  const int turn = turn_of_lane(draw);
  const int lane = (std::countr_zero(std::rotr(runnable, turn)) + turn) % 32;
  return threads_[static_cast<std::size_t>(of_warp * 32 + lane)].get();
}

inline bool ThreadBlock::leaves_warp(std::uint64_t draw) {
  return warp().runnable == 0 || current_->warp == starved_ || changes_warp(draw);
}

// The thread to go on with; null: all have ended, or one has failed.
inline Thread* ThreadBlock::choose() {
  const std::uint64_t draw = random_.next();  // one number decides all, by its bits
  const bool may_complete = !late_ && !transfers_.empty();
  if (leaves_warp(draw) || (completes(draw) && may_complete) || lets_others_run(draw)) {
    return choose_rarely(draw);
  }
  return choose_lane(current_->warp, draw);
}

Thread* ThreadBlock::choose_rarely(std::uint64_t draw) {
  if (completes(draw) && !late_) {
    complete_one();
  }
  if (lets_others_run(draw) && !others_run()) {
    return nullptr;
  }
  while (true) {
    int chosen = current_->warp;
    if (leaves_warp(draw)) {
      const auto weight = [&](std::size_t n, bool feeds) {
        const bool waits = static_cast<int>(n) == starved_ && !feeds;
        return warps_[n].runnable != 0 && !waits ? warps_[n].weight : 0;
      };
      const auto sum = [&](bool feeds) {
        int all = 0;
        for (std::size_t n = 0; n < warps_.size(); ++n) {
          all += weight(n, feeds);
        }
        return all;
      };
      const bool feeds = sum(false) == 0;
      const int all = sum(feeds);
      if (all == 0) {
        if (left_ == 0) {
          check_end();
        }
        if (!fault_.empty()) {
          return nullptr;
        }
        if (complete_one()) {
          continue;
        }
        if (left_ == 0) {
          return nullptr;
        }
        if (!wake_polling()) {
          return nullptr;
        }
        continue;
      }
      int ticket = random_.below(all);
      for (std::size_t n = 0; n < warps_.size(); ++n) {
        ticket -= weight(n, feeds);
        if (ticket < 0) {
          chosen = static_cast<int>(n);
          break;
        }
      }
      if (random_.below(256) == 0) {
        warps_[static_cast<std::size_t>(chosen)].weight = random_.below(3) == 0 ? 1 : 16;
      }
    }
    return choose_lane(chosen, draw);
  }
}

// Another thread goes on; returns when this one's turn comes again.
inline void ThreadBlock::go_on() {
  Thread* const self = current_;
  Thread* const next = choose();
  if (next == self) {
    return;
  }
  if (next == nullptr) {
    self->fiber.switch_to(home_);
    return;
  }
  enter(*next);
  self->fiber.switch_to(next->fiber);
}

// Threads that look at memory again and again do so; null: no thread can.
bool ThreadBlock::wake_polling() {
  constexpr int kMaxIdleTurns = 2000;  // between two of which another block goes on for thousands of its own
  const bool any = std::find(waits_on_.begin(), waits_on_.end(), &kPolling) != waits_on_.end();
  if (!any || ++idle_turns() > kMaxIdleTurns) {
    fault_ = deadlock();
    return false;
  }
  if (!others_run()) {
    return false;
  }
  wake(&kPolling);
  return true;
}

bool ThreadBlock::others_run() {
  const bool goes_on = let_other_block_run();
  is_abandoned_ = !goes_on;
  return goes_on;
}

void ThreadBlock::fail(const std::string& why) {
  fault_ = where() + why;
  thread().fiber.switch_to(home_);
  __builtin_unreachable();
}

void ThreadBlock::wait(const char* what, std::uint64_t value) {
  Thread& self = thread();
  self.waits_for = what;
  self.waits_value = value;
  warp().runnable &= ~(1U << self.lane);
  go_on();
}

void ThreadBlock::sleep(const void* key, const char* what, std::uint64_t value) {
  Thread& self = thread();
  waits_on_[static_cast<std::size_t>(self.index)] = key;
  wait(what, value);
}

void ThreadBlock::wake(const void* key) {
  for (std::size_t n = 0; n < waits_on_.size(); ++n) {
    if (waits_on_[n] == key) {
      waits_on_[n] = nullptr;
      warps_[n / 32].runnable |= 1U << n % 32;
    }
  }
  if (key != &kPolling) {
    idle_turns() = 0;
  }
}

void ThreadBlock::yield() {
  if (random_.below(4) == 0) {
    go_on();
  }
}

void ThreadBlock::poll() { sleep(&kPolling, "a change of memory", 0); }

void ThreadBlock::fail_arrival(const char* name, const Rendezvous* others) {
  fail(std::string(name) + (others == nullptr ? " with a mask that lacks the lane"
                                              : ", while lanes of its warp are in " + std::string(others->name)));
}

void ThreadBlock::begin_transfer(Transfer transfer) { transfers_.push_back(std::move(transfer)); }

bool ThreadBlock::complete_one() {
  if (transfers_.empty()) {
    return false;
  }
  idle_turns() = 0;
  const auto chosen = static_cast<std::size_t>(random_.below(static_cast<int>(transfers_.size())));
  advance(transfers_[chosen].number, false);
  return true;
}

// All threads have ended: shared memory is gone, and whatever still reads or writes it is a mistake.
void ThreadBlock::check_end() {
  const auto found = std::find_if(transfers_.begin(), transfers_.end(),
                                  [](const Transfer& transfer) { return transfer.read != nullptr; });
  if (found != transfers_.end()) {
    fault_ = where() + "the block ends while " + found->what + " is under way";
  }
}

bool ThreadBlock::is_done(std::uint64_t number, bool reads) const {
  return std::none_of(transfers_.begin(), transfers_.end(), [&](const Transfer& transfer) {
    return transfer.number == number && !(reads && transfer.read == nullptr);
  });
}

void ThreadBlock::advance(std::uint64_t number, bool reads) {
  const auto found = std::find_if(transfers_.begin(), transfers_.end(),
                                  [&](const Transfer& transfer) { return transfer.number == number; });
  if (found == transfers_.end()) {
    return;
  }
  if (found->read != nullptr) {
    found->read();
    found->read = nullptr;
  }
  if (!reads) {
    const Transfer done = std::move(*found);
    transfers_.erase(found);
    done.write();
  }
}

std::string ThreadBlock::where() const {
  std::string place = "block " + std::to_string(index_);
  if (current_ != nullptr) {
    place += ", thread " + std::to_string(current_->index) + " (warp " + std::to_string(current_->warp) + ")";
  }
  return place + ": ";
}

std::string ThreadBlock::deadlock() const {
  std::string words = "block " + std::to_string(index_) + ": no thread can go on.";
  std::map<std::string, int> waiting;
  for (int n = 0; n < count_; ++n) {
    const Thread& thread = *threads_[static_cast<std::size_t>(n)];
    const std::string warp = " Warp " + std::to_string(thread.warp) + ": ";
    char value[32];
    std::snprintf(value, sizeof value, " 0x%llx", static_cast<unsigned long long>(thread.waits_value));
    ++waiting[warp + (thread.exited ? "ended" : "waits for " + std::string(thread.waits_for) + value)];
  }
  for (const auto& [what, count] : waiting) {
    words += what + " (" + std::to_string(count) + " threads).";
  }
  return words;
}

}  // namespace distr::emulator
