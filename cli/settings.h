// SPDX-License-Identifier: Apache-2.0
// The settings that a command compares or times: the cross product of the values that the options list.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distr/grouping.h"
#include "names.h"
#include "options.h"
#include "text.h"

namespace distr::cli {

struct SettingLists {
  std::vector<Strategy> strategies{Strategy::lsh, Strategy::energy};
  std::vector<std::int64_t> group_sizes;  // empty: those of 2 and 4 that d allows
  std::vector<std::int64_t> blocks{Grouping{}.block};
  std::vector<Estimator> estimators{Estimator::sample, Estimator::mean};
  std::vector<OrderFrom> orders{Grouping{}.order_from};
  std::vector<std::optional<std::int64_t>> windows{Grouping{}.window};
  std::vector<double> skips{Grouping{}.skip};  // those above 0 are for settings with near keys
  std::int64_t sinks = Grouping{}.sinks;
  std::optional<std::int64_t> key_offset;
  bool finish = false;         // for settings that skip and drop columns
  std::optional<int> repeats;  // timed runs of each setting; empty: the device's default

  [[nodiscard]] int repeats_on(Device device) const { return repeats.value_or(device == Device::cpu ? 5 : 50); }
};

// The strategies that are one thing on every problem, which can be compared: exact and those that compute an order.
[[nodiscard]] std::vector<Strategy> all_settings();

// "a,b,c"
template <typename Enum>
[[nodiscard]] std::string names_of(const std::vector<Enum>& values, const char* separator = ",") {
  std::string text;
  for (const Enum value : values) text += (text.empty() ? "" : separator) + std::string(name_of(value));
  return text;
}

[[nodiscard]] std::string numbers_of(const std::vector<std::int64_t>& values);  // "1,2,3"

// Adds the options. The help shows the lists as they are when this is called.
void add_setting_options(CLI::App& command, SettingLists& lists);

// The cross product, exact attention first, without settings that would be the same. Strategy exact is more than that
// where keys are skipped. Throws InputError where nothing has near keys, and something is to be skipped.
[[nodiscard]] std::vector<Grouping> settings_of(const SettingLists& lists, std::int64_t head_dim, std::uint64_t seed);

// An option that takes a list, each part of which `parse` turns into a value.
template <typename Value, typename Parse>
CLI::Option* add_list(CLI::App& command, const std::string& flag, const std::string& type, const std::string& help,
                      std::vector<Value>& target, const Parse& parse) {
  const auto parse_list = [&target, parse](const std::string& words) {
    target.clear();
    for (const std::string& word : split(words)) target.push_back(parse(word));
  };
  return add_parsed(command, flag, type + ",...", help, parse_list)->group(kGroupingGroup);
}

}  // namespace distr::cli
