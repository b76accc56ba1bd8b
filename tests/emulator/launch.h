// SPDX-License-Identifier: Apache-2.0
// A grid to be run.
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
  std::uint64_t seed = 0;
};

// Runs it. Throws Error(device_failure) that says what was wrong in which thread.
void run_grid(Launch launch);

// Whatever follows depends on it, and on the number of launches before.
void set_seed(std::uint64_t seed);

}  // namespace distr::emulator
