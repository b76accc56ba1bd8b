// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace distr::cli {
namespace {

constexpr auto kPatience = std::chrono::seconds(1);
constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr const char* kEraseLine = "\r\033[K";

}  // namespace

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1), next_draw_(Clock::now() + kPatience) {}

Progress::~Progress() { clear(); }

std::function<void(std::int64_t done, std::int64_t total)> Progress::step(std::string label) {
  if (!terminal_) return {};
  return [this, label = std::move(label)](std::int64_t done, std::int64_t total) { show(label, done, total); };
}

void Progress::show(const std::string& label, std::int64_t done, std::int64_t total) {
  if (!terminal_ || total <= 0) return;
  const Clock::time_point now = Clock::now();
  if (now < next_draw_) return;
  next_draw_ = now + kInterval;
  drawn_ = true;
  const double share = 100.0 * static_cast<double>(std::min(done, total)) / static_cast<double>(total);
  std::fprintf(stderr, "%s%s: %.0f %%", kEraseLine, label.c_str(), share);
}

void Progress::clear() {
  if (drawn_) std::fputs(kEraseLine, stderr);
  drawn_ = false;
}

}  // namespace distr::cli
