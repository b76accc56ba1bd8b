// SPDX-License-Identifier: Apache-2.0
// Ends the process, with words, when something takes too long: a kernel that hangs cannot be stopped otherwise.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace distr::test {

// Ends the process with exit status 3 after printing why, the name of the calling thread's guard, and all others.
[[noreturn]] void stop_here(const std::string& why);

class Watchdog {
 public:
  explicit Watchdog(double seconds);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Work named `name`, from now to the guard's end, may take the watchdog's time.
  class Guard {
   public:
    Guard(Watchdog& watchdog, std::string name);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Watchdog& watchdog_;
  };

 private:
  using Clock = std::chrono::steady_clock;
  struct Work {
    std::string name;
    Clock::time_point deadline;
  };
  void watch();
  [[nodiscard]] std::string names();
  friend void stop_here(const std::string& why);

  std::chrono::duration<double> limit_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::map<std::thread::id, Work> work_;
  std::thread thread_;
};

}  // namespace distr::test
