// SPDX-License-Identifier: Apache-2.0
#include "tile_trials.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

#include "options.h"

namespace distr::cli {
namespace {

constexpr int kWarmUp = 2;
constexpr std::int64_t kSmall = 64, kLarge = 128;  // queries of a tile

// The kernel's tiles, the one that it takes first; none where it does not serve.
std::vector<TileShape> tiles_of(const Problem& problem, const Grouping& grouping) {
  Execution execution;
  execution.device = Device::cuda;
  execution.kernel = kTunedKernel;
  try {
    const Plan found = plan(Operation::forward, problem, grouping, execution);
    return {found.tiles().begin(), found.tiles().end()};
  } catch (const Error& error) {
    if (error.status() != Status::unsupported) throw;
    return {};
  }
}

std::vector<Candidate> candidates_of(const Problem& problem, const Grouping& grouping,
                                     const std::vector<std::int64_t>& blocks) {
  std::vector<Candidate> candidates;
  for (const std::int64_t block : reads_order(grouping) ? blocks : std::vector{grouping.block}) {
    Grouping blocked = grouping;
    blocked.block = block;
    blocked = resolve_strategy(problem, blocked, Device::cuda);
    for (const TileShape& tile : tiles_of(problem, blocked)) {
      candidates.push_back({blocked, tile, candidates.empty() || candidates.back().grouping.block != block, {}, {}});
    }
  }
  return candidates;
}

void run_once(Computation& computation, Candidate& candidate, bool counts) {
  computation.flush_caches();
  computation.mark();
  computation.execution().kernel = kTunedKernel;
  computation.execution().tile_rows = candidate.tile.rows;
  const Plan plan = computation.decide(Operation::forward, candidate.grouping);
  if (plan.reads_order()) computation.make_order(plan);
  computation.mark();
  computation.forward(plan);
  computation.mark();
  const std::vector<double> laps = computation.laps();
  if (!counts) return;
  candidate.ms.push_back(laps.at(0) + laps.at(1));
  candidate.ms_grouping.push_back(reads_order(candidate.grouping) ? laps.at(0) : 0);
}

// All in turn, so that a drift of the GPU's speed meets all alike.
void measure(Computation& computation, std::vector<Candidate>& candidates, int repeats) {
  for (int repeat = -kWarmUp; repeat < repeats; ++repeat) {
    for (Candidate& candidate : candidates) run_once(computation, candidate, repeat >= 0);
  }
  for (Candidate& candidate : candidates) {
    std::sort(candidate.ms.begin(), candidate.ms.end());
    std::sort(candidate.ms_grouping.begin(), candidate.ms_grouping.end());
  }
}

// How far a candidate is from the rule: in l, which is both the rows of a tile and those that share an order, and in m.
std::array<std::int64_t, 3> distance(const Candidate& candidate, const BlockChoice& rule) {
  const auto& [rows, keys, dim, groups] = candidate.tile;
  const std::int64_t block = reads_order(candidate.grouping) ? candidate.grouping.block : rows;
  return {std::abs(rule.l - block), std::abs(rule.l - rows), std::abs(rule.m - keys)};
}

bool has_default_block(const Candidate& candidate) {
  return !reads_order(candidate.grouping) || candidate.grouping.block == Grouping{}.block;
}

void judge(Trial& trial) {
  const auto& all = trial.candidates;
  trial.best = &*std::min_element(all.begin(), all.end(),
                                  [](const Candidate& a, const Candidate& b) { return a.median() < b.median(); });
  trial.ruled = &*std::min_element(all.begin(), all.end(), [&](const Candidate& a, const Candidate& b) {
    return distance(a, trial.rule) < distance(b, trial.rule);
  });
  const auto taken = std::find_if(all.begin(), all.end(), [](const Candidate& candidate) {
    return candidate.taken && has_default_block(candidate);
  });
  trial.taken = taken == all.end() ? nullptr : &*taken;
}

}  // namespace

const Candidate* Trial::with_rows(std::int64_t rows) const {
  const auto found = std::find_if(candidates.begin(), candidates.end(), [rows](const Candidate& candidate) {
    return candidate.tile.rows == rows && has_default_block(candidate);
  });
  return found == candidates.end() ? nullptr : &*found;
}

double Trial::scores() const {
  const auto all = static_cast<double>(problem.batch * problem.heads_q) * static_cast<double>(problem.seq_q) *
                   static_cast<double>(problem.seq_k);
  return problem.causal == Causal::none ? all : all / 2;
}

std::vector<Trial> measure_trials(const Inputs& inputs, const std::vector<Grouping>& groupings,
                                  const std::vector<std::int64_t>& blocks, int repeats) {
  const GpuProperties gpu{.shared_memory = cuda_device().shared_memory};
  const BlockChoice rule = choose_blocks(gpu, inputs.problem.head_dim, BlockRule::registers);
  Computation computation(inputs, Computation::Outputs::o, Device::cuda, 1);
  std::vector<Trial> trials;
  for (const Grouping& grouping : groupings) {
    Trial trial{inputs.problem, rule, candidates_of(inputs.problem, grouping, blocks)};
    if (trial.candidates.empty()) continue;
    measure(computation, trial.candidates, repeats);
    judge(trial);
    trials.push_back(std::move(trial));
  }
  return trials;
}

std::optional<Crossover> crossover_of(const std::vector<const Trial*>& trials) {
  struct Point {
    double scores, small, large, taken;  // ms
  };
  std::vector<Point> points;
  for (const Trial* trial : trials) {
    const Candidate* const small = trial->with_rows(kSmall);
    const Candidate* const large = trial->with_rows(kLarge);
    if (small == nullptr || large == nullptr) continue;
    points.push_back({trial->scores(), small->median(), large->median(), trial->taken->median()});
  }
  if (points.empty()) return std::nullopt;
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.scores < b.scores; });
  const auto mean_loss = [&](const auto& time) {
    double sum = 0;
    for (const Point& point : points) sum += std::log(time(point) / std::min(point.small, point.large));
    return std::exp(sum / static_cast<double>(points.size()));
  };
  Crossover best{0, std::numeric_limits<double>::infinity(), mean_loss([](const Point& p) { return p.taken; })};
  for (std::size_t n = 0; n <= points.size(); ++n) {
    // Halfway between two sizes, by ratio; beyond the ends by as much as sizes are apart there.
    const double below = n > 0 ? points[n - 1].scores : points.front().scores / 4;
    const double above = n < points.size() ? points[n].scores : points.back().scores * 4;
    const double scores = std::sqrt(below * above);
    const double loss = mean_loss([scores](const Point& p) { return p.scores <= scores ? p.small : p.large; });
    if (loss < best.loss) best = {scores, loss, best.taken};
  }
  return best;
}

}  // namespace distr::cli
