// SPDX-License-Identifier: Apache-2.0
// What a result file says about the run that wrote it.
#pragma once

#include "distr/attention.h"
#include "report.h"

namespace distr::cli {

// main() calls it with its own arguments, which become the "command" of the results.
void remember_command(int argc, char** argv);

// version, command, date (UTC), commit (from the environment variable DISTR_COMMIT, which bench/run sets; else null),
// host processor, compiler, build type, instruction set, threads; and gpu, driver and cuda, null on the CPU.
[[nodiscard]] Json run_meta(int threads, Device device = Device::cpu);

}  // namespace distr::cli
