// SPDX-License-Identifier: Apache-2.0
// In the place of src/cuda/launch_syntax.h: the grid runs on the emulator.
#pragma once

#include "emulator/device.h"

namespace distr::cuda {

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, void* stream,
                   const Arguments&... arguments) {
  emulator::enqueue(kernel, {grid, dim3(static_cast<unsigned>(threads)), shared, {}}, static_cast<cudaStream_t>(stream),
                    arguments...);
}

}  // namespace distr::cuda
