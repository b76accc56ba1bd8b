// SPDX-License-Identifier: Apache-2.0
// A stand-in for CUDA's runtime and driver, as far as the library and its tests call them. The device is this machine.
#pragma once

#include <cuda_runtime.h>

#include <functional>

namespace distr::emulator {

// Does the work now, or, if the stream is being captured, when the graph is launched.
void enqueue(cudaStream_t stream, std::function<void()> work);

}  // namespace distr::emulator
