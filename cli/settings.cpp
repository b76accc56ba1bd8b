// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>

#include "names.h"
#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

template <typename Enum>
std::string names_of(const std::vector<Enum>& values, const char* separator = ",") {
  std::string text;
  for (const Enum value : values) text += (text.empty() ? "" : separator) + std::string(name_of(value));
  return text;
}

std::vector<Strategy> all_settings() {
  std::vector<Strategy> settings;
  for (const StrategyTraits& entry : kStrategies) {
    if (is_setting(entry.strategy)) settings.push_back(entry.strategy);
  }
  return settings;
}

std::vector<std::int64_t> group_sizes_of(const SettingLists& lists, std::int64_t head_dim) {
  if (!lists.group_sizes.empty()) return lists.group_sizes;
  std::vector<std::int64_t> sizes;
  for (const std::int64_t size : {2, 4}) {
    if (size <= head_dim) sizes.push_back(size);
  }
  return sizes.empty() ? std::vector<std::int64_t>{1} : sizes;
}

// Where exact is all that is asked for, a group size would be ignored.
void require_what_groups(const SettingLists& lists) {
  const auto is_exact = [](Strategy strategy) { return strategy == Strategy::exact; };
  if (!std::all_of(lists.strategies.begin(), lists.strategies.end(), is_exact)) return;
  for (const std::int64_t size : lists.group_sizes) {
    if (size == 1) continue;
    throw InputError("--group-size: " + quoted(std::to_string(size)) +
                     " is not allowed with --strategy exact, which groups nothing; allowed: 1");
  }
}

}  // namespace

bool is_setting(Strategy strategy) {
  switch (traits(strategy).order) {
    case OrderSource::none:
      return true;
    case OrderSource::caller:
      return false;
    case OrderSource::computed:
      break;
  }
  return strategy != Strategy::automatic;
}

std::vector<Grouping> settings_of(const SettingLists& lists, std::int64_t head_dim, std::uint64_t seed) {
  require_what_groups(lists);
  Grouping exact;
  exact.strategy = Strategy::exact;
  exact.group_size = 1;
  exact.seed = seed;
  std::vector<Grouping> settings{exact};
  std::set<std::tuple<Strategy, std::int64_t, std::int64_t, Estimator, OrderFrom>> seen;
  for (const Strategy strategy : lists.strategies) {
    if (strategy == Strategy::exact) continue;
    for (const Estimator estimator : lists.estimators) {
      for (const OrderFrom order_from : lists.orders) {
        for (const std::int64_t block : lists.blocks) {
          for (const std::int64_t group_size : group_sizes_of(lists, head_dim)) {
            const Estimator relevant = traits(strategy).has_estimator ? estimator : Grouping{}.estimator;
            if (!seen.emplace(strategy, group_size, block, relevant, order_from).second) continue;
            settings.push_back({strategy, group_size, block, relevant, order_from, seed});
          }
        }
      }
    }
  }
  return settings;
}

void add_setting_options(CLI::App& command, SettingLists& lists) {
  const std::vector<Strategy> settings = all_settings();
  const auto parse_strategy = [settings](const std::string& word) {
    const auto strategy = parse_name<Strategy>("--strategy", word);
    if (!is_setting(strategy)) {
      throw InputError("--strategy: '" + word + "' is no setting to compare; allowed: " + names_of(settings, ", "));
    }
    return strategy;
  };
  add_list(command, "--strategy", names_of(settings, "|"), "Beside exact, which always comes first", lists.strategies,
           parse_strategy)
      ->default_str(names_of(lists.strategies));
  add_list(command, "--group-size", "INT", "G, 1 to d each [those of 2,4 that d allows]", lists.group_sizes,
           [](const std::string& word) { return parse_integer("--group-size", word, 1, kMaxHeadDim); });
  add_list(command, "--block", "INT", "l, the rows of Q that share one order of columns", lists.blocks,
           [](const std::string& word) { return parse_integer("--block", word, 1, kAny); })
      ->default_str(std::to_string(Grouping{}.block));
  add_list(command, "--estimator", all_names<Estimator>("|"), "What stands for a group of Q columns in lsh",
           lists.estimators, [](const std::string& word) { return parse_name<Estimator>("--estimator", word); })
      ->default_str(names_of(lists.estimators));
  add_list(command, "--order-from", all_names<OrderFrom>("|"),
           "Rows an order comes from; auto: previous with --causal, else own", lists.orders,
           [](const std::string& word) { return parse_name<OrderFrom>("--order-from", word); })
      ->default_str(names_of(lists.orders));
  add_integer(command, "--repeats", "Timed runs of each setting, in turn [5, on a GPU 50]", 1, 100000,
              [&lists](std::int64_t value) { lists.repeats = static_cast<int>(value); });
}

}  // namespace distr::cli
