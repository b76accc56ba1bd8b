// SPDX-License-Identifier: Apache-2.0
// What a result file says of the run that made it.
#pragma once

#include "report.h"

namespace distr::cli {

// To be called by main() with its own arguments, for the "command" of the results.
void remember_command(int argc, char** argv);

// version, command, date (UTC), commit (of the environment variable DISTR_COMMIT, which bench/run sets; else null),
// host processor, compiler, build type, instruction set, threads; and the keys for GPUs, null here.
[[nodiscard]] Json run_meta(int threads);

}  // namespace distr::cli
