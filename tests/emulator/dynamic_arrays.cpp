// SPDX-License-Identifier: Apache-2.0
#include "emulator/dynamic_arrays.h"

#include <cuda_runtime.h>

#include <cstdint>

namespace distr::cuda::sm90 {
alignas(1024) constinit thread_local std::uint8_t memory[emulator::kMaxSharedBytes] = {};
}  // namespace distr::cuda::sm90
namespace distr::cuda::sm80 {
alignas(1024) constinit thread_local std::uint8_t shared[emulator::kMaxSharedBytes] = {};
}  // namespace distr::cuda::sm80
namespace distr::cuda::lsh {
alignas(1024) constinit thread_local uint4 s_dynamic[emulator::kMaxSharedBytes / sizeof(uint4)] = {};
}  // namespace distr::cuda::lsh

namespace distr::emulator {

std::vector<DynamicArray> dynamic_arrays() {
  return {{std::as_writable_bytes(std::span(cuda::sm90::memory)), 1024},
          {std::as_writable_bytes(std::span(cuda::sm80::shared)), 1024},
          {std::as_writable_bytes(std::span(cuda::lsh::s_dynamic)), 16}};
}

}  // namespace distr::emulator
