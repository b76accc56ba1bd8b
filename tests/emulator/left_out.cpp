// SPDX-License-Identifier: Apache-2.0
// What the emulated check does without: the kernels of the CPU, which take long to compile, cases that take long to
// run, and streams, whose work is done at once here.
#include "gpu/device_api.h"
#include "gpu/large_cases.h"
#include "kernel.h"

namespace distr {

Backend cpu_backend() { return {}; }

namespace test {

std::vector<Case> large_cases() { return {}; }
std::string judge_streams(DType) { return ""; }
std::string judge_memory() { return ""; }

}  // namespace test
}  // namespace distr
