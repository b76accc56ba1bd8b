// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace distr::cli {
namespace {

// A line "<key>:  <number> kB" of /proc/self/status, in bytes.
std::int64_t status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    std::int64_t kilobytes = 0;
    if (word == key + ":" && file >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

}  // namespace

PeakMemory::PeakMemory() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts anew (proc(5))
  before_ = status_bytes("VmRSS");
}

std::int64_t PeakMemory::bytes() const { return std::max<std::int64_t>(0, status_bytes("VmHWM") - before_); }

}  // namespace distr::cli
