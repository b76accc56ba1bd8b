// SPDX-License-Identifier: Apache-2.0
// What the vector units can do: multiply-adds on registers alone.
#include <algorithm>
#include <chrono>

#include "common/parallel.h"
#include "distr/measure.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/peak.cpp"
#include <hwy/foreach_target.h>
// After foreach_target:
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Floating-point operations of `rounds` rounds of 12 independent multiply-adds; `sink` keeps them from being removed.
double multiply_adds(std::int64_t rounds, float& sink) {
  constexpr std::size_t kChains = 12;
  const hn::ScalableTag<float> tag;
  const auto factor = hn::Set(tag, 0.9999F);
  const auto term = hn::Set(tag, 1e-4F);
  hn::Vec<decltype(tag)> sums[kChains];
  for (auto& sum : sums) {
    sum = hn::Set(tag, sink);
  }
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (auto& sum : sums) {
      sum = hn::MulAdd(sum, factor, term);
    }
  }
  for (const auto& sum : sums) {
    sink += hn::GetLane(sum);
  }
  return 2.0 * static_cast<double>(rounds) * static_cast<double>(kChains * hn::Lanes(tag));
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace distr {
namespace cpu {
HWY_EXPORT(multiply_adds);
}  // namespace cpu

inline namespace v0 {

double fma_peak(const Execution& execution) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kRounds = 2'000'000;  // some 10 ms
  Execution run = execution;
  run.threads = run.threads == 0 ? common::available_processors() : run.threads;
  run.progress = nullptr;
  double best = 0;
  for (int attempt = 0; attempt < 8; ++attempt) {
    std::vector<double> operations(static_cast<std::size_t>(run.threads));
    const auto start = Clock::now();
    common::parallel_for(run, run.threads, [&](std::int64_t task, int) {
      float sink = 0;
      operations[static_cast<std::size_t>(task)] = HWY_DYNAMIC_DISPATCH(cpu::multiply_adds)(kRounds, sink);
      operations[static_cast<std::size_t>(task)] += sink == -1 ? 1 : 0;
    });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    double sum = 0;
    for (const double count : operations) {
      sum += count;
    }
    best = std::max(best, sum / seconds);
  }
  return best;
}

}  // namespace v0
}  // namespace distr
#endif
