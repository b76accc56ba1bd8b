// SPDX-License-Identifier: Apache-2.0
// The CUDA backend of a build without CUDA: an empty list.
#include "kernel.h"

namespace distr {

Backend cuda_backend() { return {}; }

std::vector<std::string> cuda_device_names(std::string& reason) {
  reason = "this build has no CUDA kernels";
  return {};
}

}  // namespace distr
