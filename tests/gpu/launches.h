// SPDX-License-Identifier: Apache-2.0
// Which kernels this program has and which of them it has launched, with how many threads and how much shared memory,
// and how many blocks of them an SM holds. The linker puts this between every launch and the runtime (--wrap).
#pragma once

#include <string>
#include <vector>

namespace distr::test {

// Writes {"gpu": ..., "target": "sm_90", "launches": [{"kernel", "threads", "dynamic_shared_bytes", "registers",
// "static_shared_bytes", "local_bytes", "blocks_per_sm"}]}, each combination once; `kernel` is the mangled name.
// tools/register_table.py reads it.
void write_launches(const std::string& path);

// The kernels that the GPU could have been asked for and was not, by their names in the source; without those that are
// there to be timed alone.
std::vector<std::string> never_launched();

}  // namespace distr::test
