// SPDX-License-Identifier: Apache-2.0
// Answers of the textbook, kept for the kernels that are asked the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <utility>

#include "support/cases.h"
#include "support/oracle.h"

namespace distr::test {

// All that a truth depends on, by value: an instance may be changed between two calls.
struct Question {
  Question(const Instance& instance, Precision wanted, std::int64_t first_group)
      : problem(instance.test_case.problem),
        grouping(instance.test_case.grouping),
        precision(wanted),
        rotation(first_group),
        q(instance.q),
        k(instance.k),
        v(instance.v),
        mask(instance.mask),
        boolean_mask(instance.boolean_mask),
        order(instance.order),
        key_means(instance.key_means) {}
  bool operator==(const Question&) const = default;

  Problem problem;
  Grouping grouping;
  Precision precision;
  std::int64_t rotation;
  Buffer q, k, v, mask;
  std::vector<std::uint8_t> boolean_mask;
  std::vector<std::int32_t> order;
  std::vector<float> key_means;
};

// The last answers, as many as an instance, or a list of a few small ones, has.
template <class Key, class Answer>
class Memo {
 public:
  template <class Make>
  const Answer& get(Key key, const Make& make) {
    const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const auto& entry) { return entry.first == key; });
    if (found != kept_.end()) {
      return found->second;
    }
    kept_.emplace_back(std::move(key), make());
    if (kept_.size() > kMost) {
      kept_.pop_front();
    }
    return kept_.back().second;
  }

 private:
  static constexpr std::size_t kMost = 8;
  std::deque<std::pair<Key, Answer>> kept_;
};

}  // namespace distr::test
