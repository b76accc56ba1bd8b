// SPDX-License-Identifier: Apache-2.0
// Strategy `auto`: exact attention; where a group size is asked for and an approximation pays, the strategy that
// measures best.
#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>

#include "dispatch.h"
#include "kernel.h"
#include "left_out.h"

namespace distr {
namespace {

// Where `energy` is worth its error to those who ask for it. Smaller heads lose too much when half of their columns go;
// on shorter sequences it was, in the middle of the settings, less than 1.15 times as quick as exact attention. The
// numbers are in DESIGN.md, under "What auto chooses".
struct Crossover {
  Device device;
  std::int64_t head_dim;  // from this d on
  std::int64_t seq;       // and from so many rows of Q, and of K, on
};

// By device, and for each the smallest d first.
constexpr std::array<Crossover, 3> kCrossovers{
    {{Device::cpu, 64, 2048}, {Device::cpu, 128, 1024}, {Device::cuda, 64, 8192}}};
// By Hopper's own kernel, in bf16 and with one grouping for the whole sequence. Groupings by blocks gain nothing in
// the backward.
constexpr std::array<Crossover, 1> kHopperCrossovers{{{Device::cuda, 64, 16384}}};

// The last entry for the device that has no larger d than the problem, or the first.
const Crossover& crossover_of(std::span<const Crossover> crossovers, Device device, std::int64_t head_dim) {
  auto found = std::find_if(crossovers.begin(), crossovers.end(),
                            [device](const Crossover& entry) { return entry.device == device; });
  for (auto next = found; next != crossovers.end() && next->device == device; ++next) {
    if (next->head_dim <= head_dim) {
      found = next;
    }
  }
  return *found;
}

// Whether Hopper's own kernel, which the crossovers above are of, serves the grouping with another strategy.
bool is_served_by_hopper(const Problem& problem, Grouping grouping, Strategy strategy) {
  grouping.strategy = strategy;
  const auto kernels = cuda_backend().forward;
  return std::any_of(kernels.begin(), kernels.end(), [&](const ForwardKernel& kernel) {
    return kernel.name == std::string_view("sm90/forward") && !LeftOut().has(kernel.name) &&
           kernel.supports(problem, grouping).empty();
  });
}

// CUDA's crossovers are those of the tensor-core kernels with tiles of 128 queries. Why these do not serve; empty: they
// do.
std::string without_tensor_cores(const Problem& problem, const Grouping& grouping) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "exact, as on a GPU no approximation has been measured in other types than f16 and bf16";
  }
  if (std::max(problem.head_dim, problem.head_dim_v) > 256) {
    return "exact, as on a GPU no approximation has been measured for a head_dim or head_dim_v above 256";
  }
  if (problem.mask.kind != MaskKind::none) {
    return "exact, as on a GPU no approximation has been measured with a mask tensor";
  }
  if (grouping.block % 128 != 0 && grouping.block < problem.seq_q) {
    return "exact, as on a GPU an approximation pays for blocks that 128 divides, and " +
           std::to_string(grouping.block) + " is none";
  }
  return {};
}

// Shorter blocks fuse K more often than the smaller product saves; wider values leave little to save.
constexpr std::int64_t kShortestBlock = 64;
constexpr std::int64_t kWidestValues = 4;  // times head_dim

}  // namespace

Resolved resolve(const Problem& problem, const Grouping& grouping, Device device) {
  if (grouping.strategy != Strategy::automatic) {
    const bool nothing_to_group = grouping.strategy != Strategy::exact && grouping.group_size == 1;
    return {grouping, nothing_to_group ? "exact, as the group size is 1" : "as asked for"};
  }
  Resolved result{grouping, {}};
  result.grouping.strategy = Strategy::exact;
  const bool hopper = device == Device::cuda && is_served_by_hopper(problem, grouping, Strategy::exact);
  const std::span<const Crossover> crossovers = hopper ? std::span<const Crossover>(kHopperCrossovers) : kCrossovers;
  const Crossover& needed = crossover_of(crossovers, device, problem.head_dim);
  const std::string no_tensor_cores = device == Device::cuda ? without_tensor_cores(problem, grouping) : "";
  const std::int64_t shorter = std::min(problem.seq_q, problem.seq_k);
  if (grouping.group_size == 1) {
    result.choice = "exact, as the group size is 1 (auto approximates only where a larger one is asked for)";
  } else if (grouping.order_from == OrderFrom::previous && grouping.block >= problem.seq_q) {
    result.choice = "exact, as the first block is where orders come from the block before, and there is no other";
  } else if (problem.dtype == DType::f64) {
    result.choice = "exact, as the float64 reference gains nothing from an approximation";
  } else if (hopper && !(problem.dtype == DType::bf16 && is_served_by_hopper(problem, grouping, Strategy::energy))) {
    result.choice =
        "exact, as this GPU has kernels for it that an approximation is quicker than, forward and backward, only in "
        "bf16 with the whole sequence as one block";
  } else if (!no_tensor_cores.empty()) {
    result.choice = no_tensor_cores;
  } else if (problem.head_dim < needed.head_dim) {
    result.choice = "exact, as heads of head_dim " + std::to_string(problem.head_dim) +
                    " lose too much to an approximation (from " + std::to_string(needed.head_dim) + " on it can pay)";
  } else if (shorter < needed.seq) {
    result.choice = "exact, as " + std::to_string(shorter) +
                    " rows or keys are too few for an approximation to pay (from " + std::to_string(needed.seq) +
                    " on it does)";
  } else if (grouping.block < kShortestBlock) {
    result.choice = "exact, as blocks of " + std::to_string(grouping.block) +
                    " rows share too little work for an approximation to pay (from " + std::to_string(kShortestBlock) +
                    " on they do)";
  } else if (problem.head_dim_v > kWidestValues * problem.head_dim) {
    result.choice =
        "exact, as nearly all work is the product with V, whose head_dim_v is " + std::to_string(problem.head_dim_v);
  } else {
    result.grouping.strategy = Strategy::energy;
    result.choice = "energy, which pays from " + std::to_string(needed.seq) + " rows and keys on, and errs least";
  }
  return result;
}

}  // namespace distr
