// SPDX-License-Identifier: Apache-2.0
// Its dynamic shared memory is declared in an unnamed namespace, and so is defined here.
#include <cuda_runtime.h>

#include "emulator/dynamic_arrays.h"

namespace distr::cuda::lsh {
namespace {
alignas(1024) constinit thread_local uint4 s_dynamic[distr::emulator::kMostSharedBytes / sizeof(uint4)] = {};
}  // namespace
}  // namespace distr::cuda::lsh

#include "../../src/cuda/grouping_lsh.cu"
