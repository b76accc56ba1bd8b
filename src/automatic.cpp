// SPDX-License-Identifier: Apache-2.0
// Strategy `auto`: exact attention where an approximation cannot pay, else the strategy that measures best.
#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "dispatch.h"

namespace distr {
namespace {

// The shortest sequence from which on `energy` was at least 1.15 times as quick as exact attention, for head dimensions
// up to `head_dim`. CPU: bench/results/cpu/forward_f32.json; smaller gains are not worth an error, and below d = 32
// they are not measured.
struct Crossover {
  Device device;
  std::int64_t head_dim;
  std::int64_t group_size;  // from this G on
  std::int64_t seq;         // both seq_q and seq_k
};

// Shorter blocks fuse K more often than the smaller product saves; wider values leave little to save.
constexpr std::int64_t kShortestBlock = 64;
constexpr std::int64_t kWidestValues = 4;  // times head_dim

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

constexpr std::array<Crossover, 3> kCrossovers{
    {{Device::cpu, 31, 2, kNever}, {Device::cpu, 63, 2, 1024}, {Device::cpu, kMaxHeadDim, 2, 512}}};

std::int64_t crossover(Device device, std::int64_t head_dim, std::int64_t group_size) {
  const auto* const row = std::find_if(kCrossovers.begin(), kCrossovers.end(), [&](const Crossover& entry) {
    return entry.device == device && head_dim <= entry.head_dim && group_size >= entry.group_size;
  });
  return row == kCrossovers.end() ? kNever : row->seq;
}

}  // namespace

Resolved resolve(const Problem& problem, const Grouping& grouping, Device device) {
  if (grouping.strategy != Strategy::automatic) {
    return {grouping, "as asked for"};
  }
  Resolved result{grouping, {}};
  const std::int64_t needed = crossover(device, problem.head_dim, grouping.group_size);
  const std::int64_t shorter = std::min(problem.seq_q, problem.seq_k);
  result.grouping.strategy = Strategy::exact;
  if (device == Device::cuda) {
    result.choice = "exact, as no approximation has been measured on this device";
  } else if (grouping.group_size == 1) {
    result.choice = "exact, as group size 1 is exact attention";
  } else if (problem.dtype == DType::f64) {
    result.choice = "exact, as the float64 reference gains nothing from an approximation";
  } else if (shorter < needed) {
    result.choice = "exact, as " + std::to_string(shorter) + " rows or keys of head_dim " +
                    std::to_string(problem.head_dim) + " are too few for an approximation to pay" +
                    (needed == kNever ? "" : " (from " + std::to_string(needed) + " on it does)");
  } else if (grouping.block < kShortestBlock) {
    result.choice = "exact, as blocks of " + std::to_string(grouping.block) +
                    " rows share too little work for an approximation to pay (from " + std::to_string(kShortestBlock) +
                    " on they do)";
  } else if (problem.head_dim_v > kWidestValues * problem.head_dim) {
    result.choice =
        "exact, as nearly all work is the product with V, whose head_dim_v is " + std::to_string(problem.head_dim_v);
  } else {
    result.grouping.strategy = Strategy::energy;
    result.choice = "energy, which pays from " + std::to_string(needed) + " rows and keys on, and errs least";
  }
  return result;
}

}  // namespace distr
