// SPDX-License-Identifier: Apache-2.0
// How often this process has made each decision about a call (distr/plan.h, decisions()).
#pragma once

#include <atomic>
#include <cstdint>

namespace distr {

struct DecisionCounts {
  std::atomic<std::int64_t> validated = 0, resolved = 0, chosen = 0;
};
inline DecisionCounts decision_counts;

inline void count(std::atomic<std::int64_t>& decision) { decision.fetch_add(1, std::memory_order_relaxed); }

}  // namespace distr
