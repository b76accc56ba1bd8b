// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime and driver as far as the library and its tests call them, for a device that is this machine.
#pragma once

#include <cuda_runtime.h>

#include <functional>

namespace distr::emulator {

// Does it now, or, where the stream is being captured, when the graph is launched.
void enqueue(cudaStream_t stream, std::function<void()> work);

}  // namespace distr::emulator
