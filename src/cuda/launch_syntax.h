// SPDX-License-Identifier: Apache-2.0
// Where kernels are launched in CUDA's own syntax. tests/emulator/ has a header in the place of this one.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace distr::cuda {

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, void* stream,
                   const Arguments&... arguments) {
  kernel<<<grid, static_cast<unsigned>(threads), shared, static_cast<cudaStream_t>(stream)>>>(arguments...);
}

}  // namespace distr::cuda
