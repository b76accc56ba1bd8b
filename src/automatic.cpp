// SPDX-License-Identifier: Apache-2.0
// What a caller leaves open. Strategy `auto`: exact attention; where a group size is asked for and an approximation
// pays, the strategy that measures best. Orders from `auto`: from the block before wherever a row must not see its
// future. What pays on a device its backend says (cpu/heuristics.h, cuda/heuristics.h), and what pays on every device
// common/heuristics.h.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

#include "common/block.h"
#include "common/heuristics.h"
#include "common/mask.h"
#include "common/near.h"
#include "decisions.h"
#include "dispatch.h"

namespace distr {
namespace {

Advice device_advice(const Problem& problem, const Grouping& grouping, Device device) {
  switch (device) {
    case Device::cpu:
      return cpu_advice(problem, grouping);
    case Device::cuda:
      break;
  }
  return cuda_advice(problem, grouping);
}

// Of the scores of all queries and keys that they see, those that are exact as the key is near; what rows of a block
// see is taken from its last one.
double near_share(const Problem& problem, const Grouping& grouping) {
  double near = 0;
  double all = 0;
  const std::int64_t block = common::near_rows(problem, grouping);
  for (std::int64_t i = 0; i < problem.seq_q; i += block) {
    const std::int64_t rows = std::min(block, problem.seq_q - i);
    const std::int64_t seen = common::visible_keys(problem, i, rows).end;
    const common::NearTiles tiles = common::near_tiles(problem, grouping, i);
    const auto keys_to = [&](std::int64_t tile) { return std::min(tile * common::kNearTile, seen); };
    const std::int64_t first = std::max(tiles.first, tiles.sinks);
    const std::int64_t near_keys = keys_to(tiles.sinks) + keys_to(std::max(tiles.last, first)) - keys_to(first);
    near += static_cast<double>(rows * near_keys);
    all += static_cast<double>(rows * seen);
  }
  return all > 0 ? near / all : 1;
}

// What holds on every device, before and after what its backend says.
Advice advice(const Problem& problem, const Grouping& grouping, Device device) {
  if (grouping.group_size == 1) {
    return {false, "as the group size is 1 (auto approximates only where a larger one is asked for)"};
  }
  if (common::has_window(problem)) {
    return {false, "as there is a sliding window, with which no approximation was measured"};
  }
  if (problem.softcap != 0) {
    return {false, "as no approximation has been measured with capped scores"};
  }
  if (common::has_lengths(problem)) {
    return {false, "as lengths are data, which approximations do not have"};
  }
  if (grouping.order_from == OrderFrom::previous && grouping.block >= problem.seq_q) {
    return {false, "as the first block is where orders come from the block before, and there is no other"};
  }
  if (problem.dtype == DType::f64) {
    return {false, "as the float64 reference gains nothing from an approximation"};
  }
  Advice of_device = device_advice(problem, grouping, device);
  if (!of_device.pays) {
    return of_device;
  }
  if (grouping.block < common::kShortestBlock) {
    return {false, "as blocks of " + std::to_string(grouping.block) +
                       " rows share too little work for an approximation to pay (from " +
                       std::to_string(common::kShortestBlock) + " on they do)"};
  }
  if (common::has_near_keys(grouping)) {
    const double share = near_share(problem, grouping);
    if (share > common::kMostNear) {
      const auto percent = [](double of) { return std::to_string(std::lround(100 * of)) + " %"; };
      return {false, "as " + percent(share) + " of the scores are of near keys, which are exact (up to " +
                         percent(common::kMostNear) + " an approximation of the others can pay)"};
    }
  }
  if (problem.head_dim_v > common::kWidestValues * problem.head_dim) {
    return {false,
            "as nearly all work is the product with V, whose head_dim_v is " + std::to_string(problem.head_dim_v)};
  }
  return of_device;
}

OrderFrom order_from(const Problem& problem, const Grouping& grouping) {
  if (grouping.order_from != OrderFrom::automatic) {
    return grouping.order_from;
  }
  const bool is_computed = traits(grouping.strategy).order == OrderSource::computed;
  return (is_computed || common::has_key_means(grouping)) && problem.causal != Causal::none ? OrderFrom::previous
                                                                                            : OrderFrom::own;
}

// Why a strategy that the caller named comes to what it does.
std::string choice_of(const Problem& problem, const Grouping& decided) {
  if (decided.strategy == Strategy::exact) {
    return "as asked for";
  }
  if (is_exact(decided)) {
    return "exact, as the group size is 1";
  }
  const bool is_one_exact_block = common::is_exact_block(decided, 0) && decided.block >= problem.seq_q;
  return is_one_exact_block ? "exact, as the only block has none before it for an order to come from" : "as asked for";
}

// What near keys and `skip` do, behind the choice of a strategy.
std::string near_text(const Grouping& decided) {
  std::ostringstream text;
  if (decided.window.has_value()) {
    text << "; near keys, up to " << *decided.window << " from a block's rows";
    if (decided.sinks > 0) {
      text << " and the first " << decided.sinks;
    }
    text << ", are exact";
  } else if (decided.sinks > 0) {
    text << "; the first " << decided.sinks << " keys are exact";
  }
  if (decided.skip > 0) {
    text << "; far keys are skipped, 64 at a time, where none has a probability of " << decided.skip
         << " beside the near ones" << (decided.finish ? ", and others finished" : "");
  }
  return text.str();
}

// Options that have nothing to act on: near keys where all are exact and none is skipped, and the offset of no window.
void drop_idle_options(Grouping& decided) {
  if (is_exact(decided)) {
    decided.finish = false;  // `auto` may have been asked for it
  }
  if (is_exact(decided) && decided.skip == 0) {
    decided.window.reset();
    decided.sinks = 0;
  }
  if (!decided.window.has_value()) {
    decided.key_offset.reset();
  }
}

}  // namespace

Resolved resolve(const Problem& problem, const Grouping& grouping, Device device) {
  count(decision_counts.resolved);
  Resolved result{grouping, {}};
  Grouping& decided = result.grouping;
  decided.order_from = order_from(problem, grouping);
  if (grouping.strategy == Strategy::automatic) {
    const Advice found = advice(problem, decided, device);
    decided.strategy = found.pays ? Strategy::energy : Strategy::exact;
    result.choice = std::string(traits(decided.strategy).name) + ", " + found.why;
  } else {
    result.choice = choice_of(problem, decided);
  }
  drop_idle_options(decided);
  const bool groups = common::count_exact_rows(problem, decided) < problem.seq_q;
  if (groups && grouping.order_from == OrderFrom::automatic && decided.order_from == OrderFrom::previous) {
    result.choice += "; orders come from the block before, as the call is causal";
  }
  result.choice += near_text(decided);
  return result;
}

}  // namespace distr
