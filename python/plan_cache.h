// SPDX-License-Identifier: Apache-2.0
// The plans of a thread's last calls. A model makes the same few calls in every layer of every step, and to decide one
// again takes as long as to launch a kernel.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "distr/plan.h"

namespace distr::binding {

// All that a plan depends on.
struct PlanKey {
  Operation operation;
  Problem problem;
  Grouping grouping;
  Device device;
  std::int32_t device_index;
  int threads;
  bool deterministic;

  bool operator==(const PlanKey&) const = default;
};

class PlanCache {
 public:
  // This thread's.
  static PlanCache& instance() {
    thread_local PlanCache cache;
    return cache;
  }

  // The plan of the key; make() makes it where none of the last calls had it.
  template <class Make>
  Plan find_or_make(const PlanKey& key, const Make& make) {
    const std::string_view disabled = disabled_kernels();
    for (const auto& entry : entries_) {
      if (entry && entry->key == key && entry->disabled == disabled) {
        return entry->plan;
      }
    }
    Plan made = make();
    entries_[next_] = {key, std::string(disabled), made};
    next_ = (next_ + 1) % entries_.size();
    return made;
  }

 private:
  struct Entry {
    PlanKey key;
    std::string disabled;
    Plan plan;
  };

  std::array<std::optional<Entry>, 16> entries_;  // in the order of their making, the oldest at next_
  std::size_t next_ = 0;
};

}  // namespace distr::binding
