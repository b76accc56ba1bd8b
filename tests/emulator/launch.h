// SPDX-License-Identifier: Apache-2.0
// Runs a grid. A few of its blocks are active at a time; they begin in order and take turns.
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
  std::function<void()> kernel;  // the kernel with its arguments, as one thread calls it
  bool is_dependent = false;     // a dependent launch, which the emulator still runs after the kernel before it
  std::uint64_t seed = 0;
};

// Runs the grid. Throws Error(device_failure), which says what was wrong in which thread.
void run_grid(Launch launch);

// All later runs depend on the seed and on the number of launches since.
void set_seed(std::uint64_t seed);
// How many blocks of a launch may be active at the same time.
void set_max_resident_ctas(int blocks);

// Called by a block: runs another active block and returns later. Returns false if the launch has failed and the block
// must end.
[[nodiscard]] bool let_other_block_run();
// How often active blocks have only polled memory since one of them last did something else.
[[nodiscard]] int& idle_turns();

}  // namespace distr::emulator
