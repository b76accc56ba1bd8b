// SPDX-License-Identifier: Apache-2.0
// Kernels that may start while the one before them in the stream still runs (programmatic dependent launch, from sm_90
// on), so that their start costs nothing: launch_dependent() launches them, and they call wait_on_dependent_grids(),
// all threads, before they read or write global memory (but for the second launches of sm90/forward and of both
// backwards, which run beside the first: they wait at their end, sm90's in a warpgroup of each block or two). They
// do not read by __ldg: nothing keeps the compiler from sending such a load off before the wait, and it has done so.
// wait_on_dependent_grids() returns when all that came before in the stream is done, if each kernel before waited so as
// well or was launched as usual. A kernel that calls launch_dependent_grids() lets the next one start as soon as all
// its blocks have called it and there is room: first thing, unless the next one counts on its inputs.
#pragma once

#include <algorithm>
#include <array>

#include "cuda/launch.h"

namespace distr::cuda {

__device__ inline void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Whether the code that this device runs, of what was compiled, is of an architecture that has the two functions above.
// Where it is not, a kernel that starts early would not wait.
[[nodiscard]] inline bool supports_dependent_launch() {
#ifdef __CUDA_ARCH_LIST__
  constexpr std::array kCompiled{__CUDA_ARCH_LIST__};
  const DeviceProperties& device = device_properties();
  const int own = device.major * 100 + device.minor * 10;
  return std::any_of(kCompiled.begin(), kCompiled.end(), [&](int arch) { return arch >= 900 && arch <= own; });
#else
  return false;
#endif
}

// As launch(), otherwise.
template <class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, void* stream,
                      const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = supports_dependent_launch() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
}

}  // namespace distr::cuda
