// SPDX-License-Identifier: Apache-2.0
#include "emulator/synchronization.h"

#include <cstring>
#include <string>

#include "emulator/block.h"
#include "emulator/shared_memory.h"

namespace distr::emulator {
namespace {

constexpr std::int64_t kMostBytes = (1 << 20) - 1;
constexpr std::uint32_t kMostArrivals = (1 << 20) - 1;
constexpr std::uint64_t kMagic = 0xBA881E8BA881E800;  // in the barrier's memory: who writes there destroys it

void complete_phase(MemoryBarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.count;
    barrier.phase ^= 1;
    block().wake(&barrier);
  }
}

}  // namespace

MemoryBarrier& Block::barrier(std::uint32_t address, const char* user) {
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
  if (arrivals == 0 || arrivals > kMostArrivals) {
    block().fail("mbarrier.init with " + std::to_string(arrivals) + " arrivals");
  }
  block().barriers()[barrier] = {arrivals, arrivals, 0, 0};
}

void barrier_arrive(std::uint32_t address, unsigned bytes) {
  MemoryBarrier& barrier = block().barrier(address, "mbarrier.arrive");
  barrier.bytes += bytes;
  if (barrier.bytes > kMostBytes) {
    block().fail("a barrier expects " + std::to_string(barrier.bytes) + " bytes; allowed: up to " +
                 std::to_string(kMostBytes));
  }
  if (barrier.pending == 0) {
    block().fail("an arrival more than the " + std::to_string(barrier.count) + " of the barrier's phase");
  }
  --barrier.pending;
  complete_phase(barrier);
  block().yield();
}

void barrier_complete(std::uint32_t address, std::int64_t bytes, const char* user) {
  MemoryBarrier& barrier = block().barrier(address, user);
  barrier.bytes -= bytes;
  if (barrier.bytes < -kMostBytes) {
    block().fail(std::string(user) + ": more bytes than a barrier counts");
  }
  complete_phase(barrier);
}

void barrier_wait(std::uint32_t address, unsigned parity) {
  MemoryBarrier& barrier = block().barrier(address, "mbarrier.try_wait");
  block().yield();
  while (barrier.phase == (parity & 1)) {
    block().sleep(&barrier, parity == 0 ? "phases of parity 0 of mbarrier" : "phases of parity 1 of mbarrier", address);
  }
}

void wait_for_inputs() { block().has_waited = true; }

void named_barrier_sync(int number, int threads) {
  NamedBarrier& barrier = block().named[number];
  const auto expected = static_cast<std::uint32_t>(threads);
  if (barrier.arrived > 0 && barrier.expected != expected) {
    block().fail("named barrier " + std::to_string(number) + " is for " + std::to_string(threads) +
                 " threads here and for " + std::to_string(barrier.expected) + " elsewhere");
  }
  if (threads % 32 != 0) {
    block().fail("named barrier for " + std::to_string(threads) + " threads, not a multiple of 32");
  }
  barrier.expected = expected;
  ++barrier.arrived;
  if (barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.phase;
    block().wake(&barrier);
    block().yield();
    return;
  }
  for (const std::uint64_t phase = barrier.phase; barrier.phase == phase;) {
    block().sleep(&barrier, "named barrier", static_cast<std::uint64_t>(number));
  }
}

// Threads that have ended are not waited for.
bool block_sync(Vote vote, bool holds) {
  NamedBarrier& barrier = block().named[0];
  const std::uint64_t phase = barrier.phase;
  bool& result = barrier.result[phase % 2];  // the next phase does not end before all have read it
  if (barrier.arrived == 0) {
    result = vote != Vote::any;
  }
  result = vote == Vote::any ? result || holds : result && holds;
  ++barrier.arrived;
  while (barrier.phase == phase) {
    if (barrier.arrived == static_cast<std::uint32_t>(block().threads_left())) {
      barrier.arrived = 0;
      ++barrier.phase;
      block().wake(&barrier);
      block().yield();
    } else {
      block().sleep(&barrier, "__syncthreads", 0);
    }
  }
  return result;
}

}  // namespace distr::emulator
