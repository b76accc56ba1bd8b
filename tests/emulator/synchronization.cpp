// SPDX-License-Identifier: Apache-2.0
#include "emulator/synchronization.h"

#include <cstring>
#include <string>

#include "emulator/shared_memory.h"
#include "emulator/thread_block.h"

namespace distr::emulator {
namespace {

constexpr std::int64_t kMaxBytes = (1 << 20) - 1;
constexpr std::uint32_t kMaxArrivals = (1 << 20) - 1;
constexpr std::uint64_t kMagic = 0xBA881E8BA881E800;  // in the barrier's memory: who writes there destroys it

void complete_phase(MemoryBarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.count;
    barrier.phase ^= 1;
    thread_block().wake(&barrier);
  }
}

}  // namespace

MemoryBarrier& ThreadBlock::barrier(std::uint32_t address, const char* user) {
  std::uint64_t magic = 0;
  std::memcpy(&magic, shared_memory().at(address, 8, 8, user), 8);
  const auto found = barriers_.find(address);
  if (found == barriers_.end()) {
    fail(std::string(user) + " of a barrier that was not initialised");
  }
  if (magic != kMagic) {
    fail(std::string(user) + " of a barrier whose memory was overwritten");
  }
  return found->second;
}

void barrier_init(std::uint32_t barrier, unsigned arrivals) {
  std::memcpy(shared_memory().at(barrier, 8, 8, "mbarrier.init"), &kMagic, 8);
  if (arrivals == 0 || arrivals > kMaxArrivals) {
    thread_block().fail("mbarrier.init with " + std::to_string(arrivals) + " arrivals");
  }
  if (!thread_block().barriers().try_emplace(barrier, MemoryBarrier{arrivals, arrivals, 0, 0}).second) {
    thread_block().fail("mbarrier.init of a barrier that was initialised before");
  }
}

void barrier_arrive(std::uint32_t address, unsigned bytes) {
  MemoryBarrier& barrier = thread_block().barrier(address, "mbarrier.arrive");
  barrier.bytes += bytes;
  if (barrier.bytes > kMaxBytes) {
    thread_block().fail("a barrier expects " + std::to_string(barrier.bytes) + " bytes; allowed: up to " +
                        std::to_string(kMaxBytes));
  }
  if (barrier.pending == 0) {
    thread_block().fail("an arrival more than the " + std::to_string(barrier.count) + " of the barrier's phase");
  }
  --barrier.pending;
  complete_phase(barrier);
  thread_block().yield();
}

void barrier_complete(std::uint32_t address, std::int64_t bytes, const char* user) {
  MemoryBarrier& barrier = thread_block().barrier(address, user);
  barrier.bytes -= bytes;
  if (barrier.bytes < -kMaxBytes) {
    thread_block().fail(std::string(user) + ": more bytes than a barrier counts");
  }
  complete_phase(barrier);
}

void barrier_wait(std::uint32_t address, unsigned parity) {
  MemoryBarrier& barrier = thread_block().barrier(address, "mbarrier.try_wait");
  thread_block().yield();
  while (barrier.phase == (parity & 1)) {
    thread_block().sleep(&barrier, parity == 0 ? "phases of parity 0 of mbarrier" : "phases of parity 1 of mbarrier",
                         address);
  }
}

void wait_on_dependent_grids() { thread_block().has_waited = true; }

namespace {

// Whether the phase ended with this thread.
bool arrive_at(NamedBarrier& barrier, int number, int threads, bool holds) {
  const auto expected = static_cast<std::uint32_t>(threads);
  if (barrier.arrived > 0 && barrier.expected != expected) {
    thread_block().fail("named barrier " + std::to_string(number) + " is for " + std::to_string(threads) +
                        " threads here and for " + std::to_string(barrier.expected) + " elsewhere");
  }
  if (threads % 32 != 0) {
    thread_block().fail("named barrier for " + std::to_string(threads) + " threads, not a multiple of 32");
  }
  barrier.expected = expected;
  if (barrier.arrived == 0) {
    barrier.result[barrier.phase % 2] = 0;  // the next phase does not end before all have read it
  }
  barrier.result[barrier.phase % 2] += holds ? 1 : 0;
  ++barrier.arrived;
  if (barrier.arrived < barrier.expected) {
    return false;
  }
  barrier.arrived = 0;
  ++barrier.phase;
  thread_block().wake(&barrier);
  return true;
}

}  // namespace

unsigned named_barrier_count(int number, int threads, bool holds) {
  NamedBarrier& barrier = thread_block().named[number];
  const std::uint64_t phase = barrier.phase;
  if (arrive_at(barrier, number, threads, holds)) {
    thread_block().yield();
    return barrier.result[phase % 2];
  }
  while (barrier.phase == phase) {
    thread_block().sleep(&barrier, "named barrier", static_cast<std::uint64_t>(number));
  }
  return barrier.result[phase % 2];
}

void named_barrier_sync(int number, int threads) { named_barrier_count(number, threads, false); }

void named_barrier_arrive(int number, int threads) {
  arrive_at(thread_block().named[number], number, threads, false);
  thread_block().yield();
}

// Threads that have ended are not waited for.
bool block_sync(Vote vote, bool holds) {
  NamedBarrier& barrier = thread_block().named[0];
  const std::uint64_t phase = barrier.phase;
  unsigned& result = barrier.result[phase % 2];  // the next phase does not end before all have read it
  if (barrier.arrived == 0) {
    result = vote != Vote::any ? 1 : 0;
  }
  result = (vote == Vote::any ? result != 0 || holds : result != 0 && holds) ? 1 : 0;
  ++barrier.arrived;
  while (barrier.phase == phase) {
    if (barrier.arrived == static_cast<std::uint32_t>(thread_block().threads_left())) {
      barrier.arrived = 0;
      ++barrier.phase;
      thread_block().wake(&barrier);
      thread_block().yield();
    } else {
      thread_block().sleep(&barrier, "__syncthreads", 0);
    }
  }
  return result != 0;
}

}  // namespace distr::emulator
