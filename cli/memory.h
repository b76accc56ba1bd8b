// SPDX-License-Identifier: Apache-2.0
// How much memory a stretch of work takes, as the kernel counts it.
#pragma once

#include <cstdint>

namespace distr::cli {

// From its construction on: the largest growth of the process's resident memory. Memory that the process had freed
// before is given back first, so that its reuse counts as growth.
class PeakMemory {
 public:
  PeakMemory();
  // 0 where the system does not tell.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  std::int64_t before_;
};

}  // namespace distr::cli
