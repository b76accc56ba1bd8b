// SPDX-License-Identifier: Apache-2.0
// Kernels that the user has disabled, to compare those that run instead: DISTR_DISABLE_KERNELS (distr/attention.h).
#pragma once

#include <string_view>

namespace distr {

class DisabledKernels {
 public:
  DisabledKernels();

  [[nodiscard]] bool has(std::string_view kernel) const noexcept;

  // Throws Error(invalid_argument) where a beginning is that of no kernel of this build.
  void validate() const;

 private:
  std::string_view beginnings_;
};

}  // namespace distr
