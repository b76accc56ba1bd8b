// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <algorithm>

#include "names.h"
#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

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

void require_near_keys(const SettingLists& lists) {
  const bool has_near = lists.sinks > 0 || std::any_of(lists.windows.begin(), lists.windows.end(),
                                                       [](const auto& window) { return window.has_value(); });
  const bool skips = std::any_of(lists.skips.begin(), lists.skips.end(), [](double skip) { return skip > 0; });
  if (skips && !has_near) {
    throw InputError("--skip: without near keys, against which it is measured; allowed: with --window or --sinks, too");
  }
  if (lists.finish && !skips) throw InputError("--finish: without --skip, which it is about; allowed: with --skip");
}

// Adds the setting with these near keys, unless it is there.
void add_with_near_keys(Grouping setting, const std::optional<std::int64_t>& window, double skip,
                        const SettingLists& lists, std::vector<Grouping>& settings) {
  const bool has_near = window.has_value() || lists.sinks > 0;
  if (skip > 0 && !has_near) return;
  const bool is_exact = setting.strategy == Strategy::exact;
  if (is_exact && skip == 0) return;
  setting.window = window;
  setting.sinks = lists.sinks;
  setting.skip = skip;
  setting.finish = lists.finish && skip > 0 && !is_exact && setting.group_size > 1 &&
                   traits(setting.strategy).members == Members::one;
  if (window.has_value()) setting.key_offset = lists.key_offset;
  if (std::find(settings.begin(), settings.end(), setting) == settings.end()) settings.push_back(setting);
}

}  // namespace

std::vector<Strategy> all_settings() {
  std::vector<Strategy> settings;
  for (const StrategyTraits& entry : kStrategies) {
    if (is_setting(entry.strategy)) settings.push_back(entry.strategy);
  }
  return settings;
}

std::vector<Grouping> settings_of(const SettingLists& lists, std::int64_t head_dim, std::uint64_t seed) {
  require_what_groups(lists);
  require_near_keys(lists);
  Grouping exact;
  exact.strategy = Strategy::exact;
  exact.group_size = 1;
  exact.seed = seed;
  std::vector<Grouping> settings{exact};
  const auto add = [&settings, &lists](Grouping setting) {
    for (const auto& window : lists.windows) {
      for (const double skip : lists.skips) {
        add_with_near_keys(setting, window, skip, lists, settings);
      }
    }
  };
  for (const Strategy strategy : lists.strategies) {
    if (strategy == Strategy::exact) {
      for (const std::int64_t block : lists.blocks) {
        exact.block = block;
        add(exact);
      }
      continue;
    }
    for (const Estimator estimator : lists.estimators) {
      for (const OrderFrom order_from : lists.orders) {
        for (const std::int64_t block : lists.blocks) {
          for (const std::int64_t group_size : group_sizes_of(lists, head_dim)) {
            const Estimator relevant = traits(strategy).has_estimator ? estimator : Grouping{}.estimator;
            add({strategy, group_size, block, relevant, order_from, seed});
          }
        }
      }
    }
  }
  return settings;
}

namespace {

void add_near_settings(CLI::App& command, SettingLists& lists) {
  add_list(command, "--window", "INT|none",
           "Keys within so many of a block's rows are exact, in whole tiles of 128 keys", lists.windows,
           [](const std::string& word) -> std::optional<std::int64_t> {
             if (word == "none") return std::nullopt;
             return parse_integer("--window", word, 0, kMaxDistance);
           })
      ->default_str(lists.windows.front() ? std::to_string(*lists.windows.front()) : "none");
  add_integer(command, "--sinks", kSinksHelp, 0, kMaxDistance, [&lists](std::int64_t value) { lists.sinks = value; })
      ->default_str(std::to_string(lists.sinks))
      ->group(kGroupingGroup);
  add_parsed(command, "--key-offset", "INT", kKeyOffsetHelp, [&lists](const std::string& word) {
    lists.key_offset = parse_key_offset(word);
  })->group(kGroupingGroup);
  add_list(command, "--skip", "P", "Leave out far keys, 64 at a time, that no row of 64 gives such a probability",
           lists.skips, parse_skip)
      ->default_str(significant(lists.skips.front()));
  command.add_flag("--finish", lists.finish, "With --skip: what is kept is exact, approximate scores only decide")
      ->group(kGroupingGroup);
}

}  // namespace

std::string numbers_of(const std::vector<std::int64_t>& values) {
  std::string text;
  for (const std::int64_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
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
  add_near_settings(command, lists);
  add_integer(command, "--repeats", "Timed runs of each setting, in turn [5, on a GPU 50]", 1, 100000,
              [&lists](std::int64_t value) { lists.repeats = static_cast<int>(value); });
}

}  // namespace distr::cli
