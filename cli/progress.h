// SPDX-License-Identifier: Apache-2.0
// A line on the terminal that shows the progress of long work.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace distr::cli {

// Prints nothing unless stderr is a terminal and the work takes longer than a second. The line is cleared at the end.
class Progress {
 public:
  Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  // The function for Execution::progress in the step `label`, or an empty one if nothing would be shown. It refers to
  // this object.
  [[nodiscard]] std::function<void(std::int64_t done, std::int64_t total)> step(std::string label);

  void show(const std::string& label, std::int64_t done, std::int64_t total);
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  bool terminal_;
  bool drawn_ = false;
  Clock::time_point next_draw_;
};

}  // namespace distr::cli
