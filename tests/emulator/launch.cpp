// SPDX-License-Identifier: Apache-2.0
#include "emulator/launch.h"

#include <atomic>
#include <cstdlib>

#include "distr/error.h"
#include "emulator/block.h"
#include "emulator/device_index.h"

thread_local constinit uint3 threadIdx{};
thread_local constinit uint3 blockIdx{};
thread_local constinit dim3 blockDim{};
thread_local constinit dim3 gridDim{};

namespace distr::emulator {

namespace {

std::uint64_t first_seed() {
  const char* const text = std::getenv("DISTR_EMULATOR_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

std::atomic<std::uint64_t> seed = first_seed() << 32;

}  // namespace

void set_seed(std::uint64_t wanted) { seed = wanted << 32; }

void run_grid(Launch launch) {
  launch.seed = ++seed;
  const std::uint64_t blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  for (std::uint64_t index = 0; index < blocks; ++index) {
    const std::string fault = block().run(launch, index);
    if (!fault.empty()) {
      throw Error(Status::device_failure, fault + " (seed " + std::to_string(launch.seed >> 32) + ", launch " +
                                              std::to_string(launch.seed & 0xFFFFFFFF) + ")");
    }
  }
}

}  // namespace distr::emulator

[[noreturn]] void __trap() { distr::emulator::block().fail("trap"); }
void __threadfence() { distr::emulator::block().yield(); }
