// SPDX-License-Identifier: Apache-2.0
// A grid to be run: some of its blocks at a time, which begin in their order and take turns.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace distr::emulator {

struct Launch {
  dim3 grid;
  dim3 threads;
  std::size_t shared_bytes = 0;  // dynamic
  std::function<void()> kernel;  // with its arguments, for one thread
  bool starts_early = false;     // it may, before the kernel before it ends; the emulator itself runs one at a time
  std::uint64_t seed = 0;
};

// Runs it. Throws Error(device_failure) that says what was wrong in which thread.
void run_grid(Launch launch);

// Whatever follows depends on it, and on the number of launches before.
void set_seed(std::uint64_t seed);
// Of a launch, at the same time.
void set_most_blocks(int blocks);

// For a block: another one that is under way goes on, and this one later. False: the launch has failed, and the block
// must end.
[[nodiscard]] bool let_other_block_run();
// How often blocks have had nothing to do but look at memory since one of them last did something else.
[[nodiscard]] int& idle_turns();

}  // namespace distr::emulator
