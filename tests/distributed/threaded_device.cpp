// SPDX-License-Identifier: Apache-2.0
#include "distributed/threaded_device.h"

#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>

namespace distr::test {
namespace {

using distributed::Copy;
using distributed::Lane;
using distributed::Mark;
using Clock = std::chrono::steady_clock;

constexpr std::byte kPoison{0xFF};

class Point {
 public:
  void reach() {
    const std::lock_guard lock(mutex_);
    time_ = Clock::now();
    reached_.notify_all();
  }
  Clock::time_point wait() {
    std::unique_lock lock(mutex_);
    reached_.wait(lock, [this] { return time_.has_value(); });
    return *time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  std::optional<Clock::time_point> time_;
};

Point& point(const Mark& mark) { return *static_cast<Point*>(mark.get()); }

// Work that a thread of its own does in order, each piece after a random while.
class LaneThread {
 public:
  LaneThread(unsigned seed, unsigned microseconds)
      : random_(seed), microseconds_(microseconds), thread_([this] { serve(); }) {}
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;
  ~LaneThread() {
    put(nullptr);
    thread_.join();
  }
  void put(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }

 private:
  void serve() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      if (!work) {
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % microseconds_));
      work();
    }
  }

  std::minstd_rand random_;
  unsigned microseconds_;  // the longest that work is put off
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;  // last: it uses the others
};

class ThreadedDevice : public distributed::StreamDevice {
 public:
  ThreadedDevice(std::string name, Seen& seen, Fault fault) : name_(std::move(name)), seen_(seen), fault_(fault) {
    execution_.threads = 1;
  }

  [[nodiscard]] std::string name() const override { return name_; }
  void within(const std::function<void()>& body) override { body(); }
  [[nodiscard]] Execution execution() const override { return execution_; }
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override {
    fail_at(Fault::What::memory, 0);
    seen_.bytes = bytes;
    memory_.assign(bytes + kAlignment, kPoison);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (kAlignment - address % kAlignment) % kAlignment;
  }
  void copy_in(std::byte* packed, const Copy& copy) override {
    fail_at(Fault::What::copy_in, seen_.copies_in++);
    lane(Lane::in).put([=] {
      for (std::size_t row = 0; row < copy.rows; ++row) {
        std::memcpy(packed + row * copy.width, copy.host + row * copy.pitch, copy.width);
      }
    });
  }
  void copy_out(const std::byte* packed, const Copy& copy) override {
    fail_at(Fault::What::copy_out, seen_.copies_out++);
    lane(Lane::out).put([=] {
      for (std::size_t row = 0; row < copy.rows; ++row) {
        std::memcpy(copy.host + row * copy.pitch, packed + row * copy.width, copy.width);
      }
    });
  }
  void compute(std::function<void()> call) override {
    fail_at(Fault::What::compute, seen_.calls++);
    seen_.calls_ahead = std::max<int>(seen_.calls_ahead, seen_.calls - done_);
    lane(Lane::compute).put([this, call = std::move(call)] {
      call();
      ++done_;
    });
  }
  [[nodiscard]] Mark mark(Lane on) override {
    auto made = std::make_shared<Point>();
    lane(on).put([made] { made->reach(); });
    return made;
  }
  void wait(Lane on, const Mark& mark) override {
    lane(on).put([mark] { point(mark).wait(); });
  }
  void wait(const Mark& mark) override { point(mark).wait(); }
  [[nodiscard]] double milliseconds(const Mark& begin, const Mark& end) override {
    return std::chrono::duration<double, std::milli>(point(end).wait() - point(begin).wait()).count();
  }
  void finish() override {
    for (const Lane each : {Lane::in, Lane::compute, Lane::out}) {
      wait(mark(each));
    }
    ++seen_.finished;
  }

 private:
  static constexpr std::size_t kAlignment = 256;

  void fail_at(Fault::What what, int count) const {
    if (fault_.what == what && fault_.after == count) {
      throw Error(what == Fault::What::memory ? Status::out_of_memory : Status::device_failure, "it broke");
    }
  }
  LaneThread& lane(Lane which) { return lanes_[static_cast<std::size_t>(which)]; }

  std::string name_;
  Seen& seen_;
  Fault fault_;
  Execution execution_;
  std::vector<std::byte> memory_;
  std::atomic<int> done_ = 0;
  std::array<LaneThread, 3> lanes_{LaneThread(1, 400), LaneThread(2, 400), LaneThread(3, 1500)};
};

}  // namespace

std::unique_ptr<distributed::StreamDevice> make_threaded_device(const std::string& name, Seen& seen, Fault fault) {
  return std::make_unique<ThreadedDevice>(name, seen, fault);
}

}  // namespace distr::test
