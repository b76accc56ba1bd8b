// SPDX-License-Identifier: Apache-2.0
// A device for tests of streaming: the CPU, whose three lanes are threads that do their work late, as a GPU's streams
// do. What streaming forgets to wait for shows as a wrong answer.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "distributed/stream_device.h"

namespace distr::test {

// Where a device fails: before its n-th copy in, call, or copy out, counted from 0; or to allocate.
struct Fault {
  enum class What : std::uint8_t { none, memory, copy_in, compute, copy_out } what = What::none;
  int after = 0;
};

// What a test sees of a device.
struct Seen {
  std::atomic<int> calls = 0, copies_in = 0, copies_out = 0, finished = 0;
  std::atomic<int> calls_ahead = 0;  // the most that were not done when another was given
  std::atomic<std::size_t> bytes = 0;
};

[[nodiscard]] std::unique_ptr<distributed::StreamDevice> make_threaded_device(const std::string& name, Seen& seen,
                                                                              Fault fault = {});

}  // namespace distr::test
