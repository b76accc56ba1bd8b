// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <sched.h>

#include <algorithm>
#include <limits>

#include "distr/device.h"
#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

constexpr int kMaxThreads = 1024;

// Exact attention groups nothing, so what says how would be ignored.
void require_unset_for_exact(const GroupingOptions& options) {
  const Grouping unset;
  const auto require = [](const char* flag, bool is_unset, const std::string& value, const char* allowed) {
    if (is_unset) return;
    throw InputError(std::string(flag) + ": " + quoted(value) +
                     " is not allowed with --strategy exact, which groups nothing; allowed: " + allowed);
  };
  const std::int64_t size = options.group_size.value_or(1);
  require("--group-size", size == 1, std::to_string(size), "1");
  const Estimator estimator = options.grouping.estimator;
  const OrderFrom order_from = options.grouping.order_from;
  require("--estimator", estimator == unset.estimator, name_of(estimator), name_of(unset.estimator));
  require("--order-from", order_from == unset.order_from, name_of(order_from), name_of(unset.order_from));
  require("--order", options.order.empty(), options.order, "no order");
}

// Near keys and what is skipped.
void add_near_options(CLI::App& app, Grouping& grouping) {
  const auto add_distance = [&app](const char* flag, const char* help, const auto& store) {
    add_integer(app, flag, help, 0, kMaxDistance, store)->group(kGroupingGroup);
  };
  add_distance("--window", "Keys within so many of a block's rows are exact, in whole tiles of 128 keys [none]",
               [&grouping](std::int64_t value) { grouping.window = value; });
  add_distance("--sinks", (std::string(kSinksHelp) + " [0]").c_str(),
               [&grouping](std::int64_t value) { grouping.sinks = value; });
  add_parsed(app, "--key-offset", "INT", kKeyOffsetHelp, [&grouping](const std::string& word) {
    grouping.key_offset = parse_key_offset(word);
  })->group(kGroupingGroup);
  add_parsed(app, "--skip", "P",
             "Leave out far keys, 64 at a time, that no row of 64 gives such a probability [0: none]",
             [&grouping](const std::string& word) { grouping.skip = parse_skip(word); })
      ->group(kGroupingGroup);
  app.add_flag("--finish", grouping.finish, "With --skip: what is kept is exact, approximate scores only decide")
      ->group(kGroupingGroup);
}

}  // namespace

void WindowSize::set(Problem& problem, std::optional<std::int64_t> key_offset) const {
  problem.window_left = left;
  problem.window_right = right;
  if (left.has_value() || right.has_value()) problem.window_offset = key_offset;
}

CLI::Option* add_parsed(CLI::App& app, const std::string& flag, const std::string& type, const std::string& help,
                        const std::function<void(const std::string&)>& parse) {
  return app.add_option_function<std::string>(flag, parse, help)->type_name(type);
}

CLI::Option* add_integer(CLI::App& app, const std::string& flag, const std::string& help, std::int64_t low,
                         std::int64_t high, const std::function<void(std::int64_t)>& store) {
  return add_parsed(app, flag, "INT", help,
                    [flag, low, high, store](const std::string& word) { store(parse_integer(flag, word, low, high)); });
}

CLI::Option* add_path(CLI::App& app, const std::string& flag, std::string& target, const std::string& type,
                      const std::string& help) {
  return add_parsed(app, flag, type, help, [flag, &target](const std::string& word) {
    if (word.empty()) throw InputError(flag + ": '' is not allowed; allowed: the path of a file");
    target = word;
  });
}

void add_input_options(CLI::App& app, InputOptions& options) {
  const auto add = [&app](const char* flag, std::string& target, const char* type, const char* help) {
    add_path(app, flag, target, type, help)->group(kInputGroup);
  };
  add("--q", options.q, "FILE.npy", "Q: [N, d], [H, N, d] or [B, H, N, d]; f2, f4 or f8");
  add("--k", options.k, "FILE.npy", "K, of Q's rank and type; its heads divide Q's");
  add("--v", options.v, "FILE.npy", "V, of Q's rank and type");
  add("--mask", options.mask, "FILE.npy", "Broadcasts to [B, H, Nq, Nk]; bool (true keeps) or float (is added)");
  add("--input", options.file, "FILE.safetensors", "Instead: tensors q, k, v and perhaps mask; F16, BF16 or F32");
}

CLI::Option* add_causal_option(CLI::App& app, Causal& target) {
  return add_choice(app, "--causal", target, "Hide later keys; the diagonal starts or ends in that corner");
}

CLI::Option* add_window_size_option(CLI::App& app, WindowSize& target) {
  const auto parse = [&target](const std::string& word) {
    const auto side_of = [](const std::string& side) {
      return side == "-1" ? std::nullopt : std::optional(parse_integer("--window-size", side, 0, kMaxDistance));
    };
    const std::vector<std::string> sides = split(word);
    if (sides.size() != 2) {
      throw InputError("--window-size: " + quoted(word) + " is not allowed; allowed: LEFT,RIGHT, such as 4095,0");
    }
    target = {side_of(sides[0]), side_of(sides[1])};
  };
  return add_parsed(app, "--window-size", "LEFT,RIGHT",
                    "A sliding window: hide the keys further before and behind a row; -1: no limit [-1,-1]", parse);
}

CLI::Option* add_softcap_option(CLI::App& app, double& target) {
  return add_parsed(app, "--softcap", "X", "Cap scores: X tanh(score / X), before a mask [none]",
                    [&target](const std::string& word) { target = parse_finite("--softcap", word); });
}

CLI::Option* add_device_option(CLI::App& app, std::optional<Device>& target) {
  const auto parse = [&target](const std::string& word) {
    if (word == "auto") {
      target.reset();
    } else if (word == name_of(Device::cpu) || word == name_of(Device::cuda)) {
      target = parse_name<Device>("--device", word);
    } else {
      throw InputError("--device: " + quoted(word) + " is unknown; allowed: auto, " + all_names<Device>());
    }
  };
  return add_parsed(app, "--device", "auto|" + all_names<Device>("|"), "Where it runs; auto is cpu", parse)
      ->default_str(target ? name_of(*target) : "auto");
}

void add_run_options(CLI::App& app, RunOptions& options) {
  const auto add = [&app](const char* flag, const std::string& type, const char* help, const auto& parse) {
    return add_parsed(app, flag, type, help, parse)->group(kRunGroup);
  };
  add_causal_option(app, options.causal)->group(kRunGroup);
  add_window_size_option(app, options.window_size)->group(kRunGroup);
  add("--scale", "X", "Of the scores [1/sqrt(d)]",
      [&options](const std::string& word) { options.scale = parse_finite("--scale", word); });
  add_softcap_option(app, options.softcap)->group(kRunGroup);
  add("--dtype", all_names<DType>("|"), "Computed in this type [the input's]; f64 by the reference",
      [&options](const std::string& word) { options.dtype = parse_name<DType>("--dtype", word); });
  add_execution_options(app, options);
}

void add_execution_options(CLI::App& app, RunOptions& options) {
  const auto add = [&app](const char* flag, const std::string& type, const char* help, const auto& parse) {
    return add_parsed(app, flag, type, help, parse)->group(kRunGroup);
  };
  add_device_option(app, options.device)->group(kRunGroup);
  add("--threads", "INT", "At most so many threads [one a processor]", [&options](const std::string& word) {
    options.threads = static_cast<int>(parse_integer("--threads", word, 1, kMaxThreads));
  });
  add("--seed", "INT", "Of the random projections of lsh", [&options](const std::string& word) {
    options.seed = parse_unsigned("--seed", word);
  })->default_str(std::to_string(options.seed));
}

void add_grouping_options(CLI::App& app, GroupingOptions& options) {
  add_choice(app, "--strategy", options.grouping.strategy, "How columns of Q and K are grouped")->group(kGroupingGroup);
  add_integer(app, "--group-size", "G, the columns in a group, 1 to d [min(2, d); auto: 1]", 1, kMaxHeadDim,
              [&options](std::int64_t value) { options.group_size = value; })
      ->group(kGroupingGroup);
  add_integer(app, "--block", "l, the rows of Q that share one order of columns", 1, kAny,
              [&options](std::int64_t value) { options.grouping.block = value; })
      ->default_str(std::to_string(options.grouping.block))
      ->group(kGroupingGroup);
  add_choice(app, "--estimator", options.grouping.estimator, "What stands for a group of Q columns in lsh")
      ->group(kGroupingGroup);
  add_choice(app, "--order-from", options.grouping.order_from,
             "Rows an order comes from; auto: previous with --causal, else own")
      ->group(kGroupingGroup);
  add_near_options(app, options.grouping);
}

double parse_skip(const std::string& word) {
  const double skip = parse_finite("--skip", word);
  if (skip >= 0 && skip < 1) return skip;
  throw InputError("--skip: " + quoted(word) +
                   " is not allowed; allowed: 0 (nothing is skipped), or a probability below 1");
}

std::int64_t parse_key_offset(const std::string& word) {
  const bool is_negative = word.starts_with('-');
  const std::int64_t size = parse_integer("--key-offset", is_negative ? word.substr(1) : word, 0, kMaxDistance);
  return is_negative ? -size : size;
}

Grouping grouping_of(const GroupingOptions& options, std::int64_t head_dim, std::uint64_t seed) {
  if (options.grouping.strategy == Strategy::exact) require_unset_for_exact(options);
  Grouping grouping = options.grouping;
  const std::int64_t size = std::min(traits(grouping.strategy).group_size, head_dim);
  grouping.group_size = options.group_size.value_or(size);
  grouping.seed = seed;
  return grouping;
}

bool reads_order(const Grouping& grouping) noexcept {
  return traits(grouping.strategy).order != OrderSource::none && grouping.group_size > 1;
}

Device choose_device(const std::optional<Device>& wanted) {
  // `auto` is the CPU: what a command computes does not change with the machine.
  return wanted.value_or(Device::cpu);
}

Device require_device(const std::optional<Device>& wanted) {
  const Device device = choose_device(wanted);
  const std::string reason = device == Device::cuda ? cuda_unusable_reason() : "";
  if (!reason.empty()) throw InputError("--device: cuda cannot be used: " + reason + "; allowed: auto, cpu");
  return device;
}

int processor_count() {
  cpu_set_t processors;
  CPU_ZERO(&processors);
  return sched_getaffinity(0, sizeof processors, &processors) == 0 ? CPU_COUNT(&processors) : 1;
}

}  // namespace distr::cli
