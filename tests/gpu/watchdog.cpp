// SPDX-License-Identifier: Apache-2.0
#include "gpu/watchdog.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace distr::test {
namespace {

std::atomic<Watchdog*> current = nullptr;

}  // namespace

void stop_here(const std::string& why) {
  Watchdog* watchdog = current.load();
  std::printf("STOPPED: %s%s\n", why.c_str(), watchdog == nullptr ? "" : watchdog->names().c_str());
  std::fflush(stdout);
  std::_Exit(3);
}

Watchdog::Watchdog(double seconds) : limit_(seconds), thread_([this] { watch(); }) { current = this; }

Watchdog::~Watchdog() {
  current = nullptr;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

Watchdog::Guard::Guard(Watchdog& watchdog, std::string name) : watchdog_(watchdog) {
  const std::lock_guard lock(watchdog_.mutex_);
  watchdog_.work_[std::this_thread::get_id()] = {
      std::move(name), Clock::now() + std::chrono::duration_cast<Clock::duration>(watchdog_.limit_)};
}

Watchdog::Guard::~Guard() {
  const std::lock_guard lock(watchdog_.mutex_);
  watchdog_.work_.erase(std::this_thread::get_id());
}

std::string Watchdog::names() {
  const std::lock_guard lock(mutex_);
  const auto own = work_.find(std::this_thread::get_id());
  std::string all = own == work_.end() ? "" : "; in the case: " + own->second.name;
  all += "; under way: ";
  for (const auto& [thread, work] : work_) {
    all += work.name + " | ";
  }
  return all;
}

void Watchdog::watch() {
  constexpr std::chrono::milliseconds kInterval{100};
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, kInterval, [this] { return stop_; })) {
    for (const auto& [thread, work] : work_) {
      if (Clock::now() > work.deadline) {
        const std::string name = work.name;
        lock.unlock();
        stop_here(name + " took more than " + std::to_string(limit_.count()) + " s");
      }
    }
  }
}

}  // namespace distr::test
