// SPDX-License-Identifier: Apache-2.0
// How much memory some work takes, as the operating system counts it.
#pragma once

#include <cstdint>

namespace distr::cli {

// The largest growth of the process's resident memory since the construction. Memory that the process had freed before
// is first given back to the system, so that its reuse counts as growth.
class PeakMemory {
 public:
  PeakMemory();
  // 0 if the system does not say.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  std::int64_t before_;
};

}  // namespace distr::cli
