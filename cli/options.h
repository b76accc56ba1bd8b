// SPDX-License-Identifier: Apache-2.0
// The options that commands share: the tensors, the kind of attention, its approximation, and where it runs.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "distr/attention.h"
#include "names.h"

namespace distr::cli {

struct InputOptions {
  std::string q, k, v, mask;  // paths; empty: not given
  std::string file;           // a .safetensors file with all of them
};

// Of a sliding window; empty: unlimited.
struct WindowSize {
  std::optional<std::int64_t> left, right;

  // key_offset: the key beside the first row of Q in calls that are not causal.
  void set(Problem& problem, std::optional<std::int64_t> key_offset) const;
};

struct RunOptions {
  Causal causal = Causal::none;
  WindowSize window_size;
  std::optional<double> scale;   // empty: 1/sqrt(d)
  double softcap = 0;            // 0: scores are not capped
  std::optional<DType> dtype;    // computed in; empty: the files'
  std::optional<Device> device;  // empty: auto
  int threads = 0;               // 0: all
  std::uint64_t seed = 0;
};

struct GroupingOptions {
  Grouping grouping;                       // but for its group size
  std::optional<std::int64_t> group_size;  // empty: min(2, d), and 1 for auto
  std::string order;                       // path of the caller's order; empty: not given
};

// The upper end of what has none.
inline constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();

// Headings of --help.
inline constexpr const char* kInputGroup = "Input";
inline constexpr const char* kOutputGroup = "Output";
inline constexpr const char* kGroupingGroup = "Approximation";
inline constexpr const char* kRunGroup = "Computation";

void add_input_options(CLI::App& app, InputOptions& options);
void add_run_options(CLI::App& app, RunOptions& options);
// Adds the run options that are not part of the problem: device, threads and seed.
void add_execution_options(CLI::App& app, RunOptions& options);
void add_grouping_options(CLI::App& app, GroupingOptions& options);
CLI::Option* add_causal_option(CLI::App& app, Causal& target);
CLI::Option* add_window_size_option(CLI::App& app, WindowSize& target);
CLI::Option* add_softcap_option(CLI::App& app, double& target);
CLI::Option* add_device_option(CLI::App& app, std::optional<Device>& target);

// An option whose word goes to `parse`, which throws InputError for a word that is not allowed.
CLI::Option* add_parsed(CLI::App& app, const std::string& flag, const std::string& type, const std::string& help,
                        const std::function<void(const std::string&)>& parse);

// An option that takes the path of a file, which may not be empty.
CLI::Option* add_path(CLI::App& app, const std::string& flag, std::string& target, const std::string& type,
                      const std::string& help);

// An option that takes one of the names of an enumeration.
template <typename Enum>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, Enum& target, const std::string& help) {
  return add_parsed(app, flag, all_names<Enum>("|"), help,
                    [flag, &target](const std::string& word) { target = parse_name<Enum>(flag, word); })
      ->default_str(name_of(target));
}

// An option that takes an integer from `low` to `high`.
CLI::Option* add_integer(CLI::App& app, const std::string& flag, const std::string& help, std::int64_t low,
                         std::int64_t high, const std::function<void(std::int64_t)>& store);

// What --skip and --key-offset take. Throw InputError for other words.
[[nodiscard]] double parse_skip(const std::string& word);
[[nodiscard]] std::int64_t parse_key_offset(const std::string& word);
inline constexpr const char* kSinksHelp = "The first keys that are exact for all rows, in whole tiles of 128 keys";
inline constexpr const char* kKeyOffsetHelp = "The key beside the first row of Q, for windows without --causal [0]";

[[nodiscard]] Grouping grouping_of(const GroupingOptions& options, std::int64_t head_dim, std::uint64_t seed);

// Whether the kernels read the order at all.
[[nodiscard]] bool reads_order(const Grouping& grouping) noexcept;

// The device that `--device` stands for.
[[nodiscard]] Device choose_device(const std::optional<Device>& wanted);

// The same. Throws InputError where it cannot be used.
[[nodiscard]] Device require_device(const std::optional<Device>& wanted);

// How many processors this process may use.
[[nodiscard]] int processor_count();

}  // namespace distr::cli
