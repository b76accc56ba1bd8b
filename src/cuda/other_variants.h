// SPDX-License-Identifier: Apache-2.0
// Which compiled kernels a call chooses among: the library's, or those of a test.
#pragma once

#include <span>

namespace distr::cuda {

// While it lives, the calls of its thread choose among these. For ablations (tests/gpu/ablations.h).
template <class Variant>
class OtherVariants {
 public:
  explicit OtherVariants(std::span<const Variant> variants) { others = variants; }
  OtherVariants(const OtherVariants&) = delete;
  OtherVariants& operator=(const OtherVariants&) = delete;
  ~OtherVariants() { others = {}; }

  [[nodiscard]] static std::span<const Variant> or_else(std::span<const Variant> own) {
    return others.empty() ? own : others;
  }

 private:
  inline static thread_local std::span<const Variant> others;
};

}  // namespace distr::cuda
