// SPDX-License-Identifier: Apache-2.0
// `distr tune`: the forward's tiles and block lengths measured on this GPU, beside the paper's rule (Section 3.3.1).
#include <algorithm>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "commands.h"
#include "output_files.h"
#include "progress.h"
#include "random_inputs.h"
#include "result_file.h"
#include "run_meta.h"
#include "settings.h"
#include "text.h"
#include "tile_trials.h"

namespace distr::cli {
namespace {

struct TuneOptions {
  std::vector<std::int64_t> head_dims{32, 64, 128, 256}, group_sizes{1, 2, 4, 8}, blocks{64, 128, 256},
      seqs{4096, 16384}, heads{10};
  std::vector<Strategy> strategies = SettingLists{}.strategies;
  std::vector<Causal> causals{Causal::none};
  std::int64_t batch = 1;
  DType dtype = DType::bf16;
  int repeats = 20;
  std::string json_out;  // path; empty: not wanted
  bool json = false;
};

std::vector<Grouping> groupings_of(const TuneOptions& options, std::int64_t head_dim) {
  std::vector<Grouping> groupings;
  for (const std::int64_t size : options.group_sizes) {
    if (size > head_dim) continue;
    for (const Strategy strategy : size == 1 ? std::vector{Strategy::exact} : options.strategies) {
      Grouping grouping;
      grouping.strategy = strategy;
      grouping.group_size = size;
      groupings.push_back(grouping);
    }
  }
  return groupings;
}

// In the order in which they are measured.
std::vector<Problem> problems_of(const TuneOptions& options) {
  std::vector<Problem> problems;
  Problem problem;
  problem.dtype = options.dtype;
  problem.batch = options.batch;
  for (const std::int64_t head_dim : options.head_dims) {
    for (const std::int64_t heads : options.heads) {
      for (const std::int64_t seq : options.seqs) {
        for (const Causal causal : options.causals) {
          problem.heads_q = problem.heads_kv = heads;
          problem.seq_q = problem.seq_k = seq;
          problem.head_dim = problem.head_dim_v = head_dim;
          problem.causal = causal;
          validate_random(problem);
          problems.push_back(contiguous(problem));
        }
      }
    }
  }
  return problems;
}

std::vector<Trial> measure_all(const TuneOptions& options, const std::vector<Problem>& problems) {
  std::vector<Trial> trials;
  Progress progress;
  Inputs inputs;
  for (std::size_t n = 0; n < problems.size(); ++n) {
    const bool differs_in_causality = n % options.causals.size() != 0;
    if (!differs_in_causality) inputs = random_inputs(problems[n], 0);
    inputs.problem = problems[n];
    const std::vector<Grouping> groupings = groupings_of(options, problems[n].head_dim);
    for (Trial& trial : measure_trials(inputs, groupings, options.blocks, options.repeats)) {
      trials.push_back(std::move(trial));
    }
    progress.show("tuning", static_cast<std::int64_t>(n + 1), static_cast<std::int64_t>(problems.size()));
  }
  return trials;
}

// The kernel that attention takes: another one may come before the one that is measured.
std::string would_run(const Trial& trial, const Candidate& candidate) {
  return explain(Operation::forward, trial.problem, candidate.grouping, Device::cuda).kernel;
}

Json candidate_json(const Trial& trial, const Candidate& candidate) {
  Json json = {{"impl", "distr"}, {"kernel", kTunedKernel}, {"op", "forward"}};
  json.update(sizes_json(trial.problem));
  json.update(grouping_json(trial.problem, candidate.grouping));
  json["kernel_dim"] = candidate.tile.head_dim;
  json["kernel_groups"] = candidate.tile.groups;
  json["tile_rows"] = candidate.tile.rows;
  json["tile_keys"] = candidate.tile.keys;
  json["ms"] = candidate.median();
  json["ms_min"] = candidate.ms.front();
  json["ms_max"] = candidate.ms.back();
  json["ms_grouping"] = Row::median_of(candidate.ms_grouping);
  json["runs"] = candidate.ms.size();
  json["tflops_exact_flops"] = exact_operations(trial.problem, Work::forward) / candidate.median() * 1e-9;
  json["rule_l"] = trial.rule.l;
  json["rule_m"] = trial.rule.m;
  json["nearest_to_rule"] = &candidate == trial.ruled;
  json["taken"] = candidate.taken;
  json["best"] = &candidate == trial.best;
  json["would_run"] = would_run(trial, candidate);
  return json;
}

// The trials that differ in sizes alone: by d, causality, strategy and G.
using Family = std::tuple<std::int64_t, Causal, Strategy, std::int64_t>;
std::map<Family, std::vector<const Trial*>> families_of(const std::vector<Trial>& trials) {
  std::map<Family, std::vector<const Trial*>> families;
  for (const Trial& trial : trials) {
    const Grouping& grouping = trial.best->grouping;
    families[{trial.problem.head_dim, trial.problem.causal, grouping.strategy, grouping.group_size}].push_back(&trial);
  }
  return families;
}

std::int64_t groups_of(const Trial& trial) {
  const Grouping& grouping = trial.best->grouping;
  return reads_order(grouping) ? num_groups(trial.problem, grouping) : trial.problem.head_dim;
}

Json tune_json(const TuneOptions& options, const std::vector<Trial>& trials) {
  const CudaDevice gpu = cuda_device();
  Json meta = run_meta(1, Device::cuda);
  meta["repeats"] = options.repeats;
  meta["shared_memory"] = gpu.shared_memory;
  meta["processors"] = gpu.processors;
  Json json = {{"meta", meta}, {"crossovers", Json::array()}, {"rows", Json::array()}};
  for (const auto& [family, members] : families_of(trials)) {
    const auto crossover = crossover_of(members);
    if (!crossover) continue;
    json["crossovers"].push_back({{"head_dim", std::get<0>(family)},
                                  {"num_groups", groups_of(*members.front())},
                                  {"strategy", name_of(std::get<Strategy>(family))},
                                  {"group_size", std::get<3>(family)},
                                  {"causal", std::get<Causal>(family) != Causal::none},
                                  {"scores_per_processor", crossover->scores / static_cast<double>(gpu.processors)},
                                  {"loss", crossover->loss},
                                  {"loss_taken", crossover->taken}});
  }
  for (const Trial& trial : trials) {
    for (const Candidate& candidate : trial.candidates) json["rows"].push_back(candidate_json(trial, candidate));
  }
  return json;
}

// "l 128, 64 x 64"; without l where nothing is grouped.
std::string tile_text(const Candidate& candidate) {
  const std::string tile = std::to_string(candidate.tile.rows) + " x " + std::to_string(candidate.tile.keys);
  return reads_order(candidate.grouping) ? "l " + std::to_string(candidate.grouping.block) + ", " + tile : tile;
}

void print_trials(const std::vector<Trial>& trials) {
  Table table;
  for (const char* head : {"d", "r", "G", "H", "N"}) table.add_column(head, Table::Align::right);
  for (const char* head : {"strategy", "causal", "rule (l, m)"}) table.add_column(head, Table::Align::left);
  for (const char* head : {"nearest to it", "taken", "best"}) {
    table.add_column(head, Table::Align::left);
    table.add_column("ms", Table::Align::right);
  }
  table.add_column("rule / best", Table::Align::right);
  for (const Trial& trial : trials) {
    const Grouping& grouping = trial.best->grouping;
    const bool has_taken = trial.taken != nullptr;
    table.add_row(
        {std::to_string(trial.problem.head_dim), std::to_string(groups_of(trial)), std::to_string(grouping.group_size),
         std::to_string(trial.problem.heads_q), std::to_string(trial.problem.seq_q), name_of(grouping.strategy),
         name_of(trial.problem.causal), "(" + std::to_string(trial.rule.l) + ", " + std::to_string(trial.rule.m) + ")",
         tile_text(*trial.ruled), significant(trial.ruled->median()), has_taken ? tile_text(*trial.taken) : "-",
         has_taken ? significant(trial.taken->median()) : "-", tile_text(*trial.best),
         significant(trial.best->median()), significant(trial.ruled->median() / trial.best->median(), 3)});
  }
  table.print(std::cout);
}

void print_crossovers(const std::vector<Trial>& trials) {
  Table table;
  for (const char* head : {"d", "r", "G"}) table.add_column(head, Table::Align::right);
  for (const char* head : {"strategy", "causal"}) table.add_column(head, Table::Align::left);
  for (const char* head : {"64 rows up to", "loss", "loss taken"}) table.add_column(head, Table::Align::right);
  const auto processors = static_cast<double>(cuda_device().processors);
  for (const auto& [family, members] : families_of(trials)) {
    const auto crossover = crossover_of(members);
    if (!crossover) continue;
    table.add_row({std::to_string(std::get<0>(family)), std::to_string(groups_of(*members.front())),
                   std::to_string(std::get<3>(family)), name_of(std::get<Strategy>(family)),
                   name_of(std::get<Causal>(family)), significant(crossover->scores / processors, 3),
                   significant(crossover->loss, 3), significant(crossover->taken, 3)});
  }
  table.print(std::cout);
}

void print_text(const TuneOptions& options, const std::vector<Trial>& trials) {
  std::cout << cuda_device().name << "; " << kTunedKernel << ", B " << options.batch << ", " << name_of(options.dtype)
            << "\n\n";
  print_trials(trials);
  std::cout << "\nms: median of " << options.repeats
            << " runs of grouping and attention. l: rows that share an order; a tile: queries x keys of a thread\n"
               "block, of those that there are kernels for. rule: the paper's, with its bound of registers (distr "
               "blocks).\n"
               "taken: by this kernel at l "
            << Grouping{}.block << ".\n";
  std::set<std::string> others;
  for (const Trial& trial : trials) others.insert(would_run(trial, *trial.best));
  others.erase(kTunedKernel);
  for (const std::string& other : others) std::cout << other << " serves some of these problems instead.\n";
  std::cout << '\n';
  print_crossovers(trials);
  std::cout
      << "\n64 rows up to: so many scores (pairs that see each other, of all heads) an SM, a tile of 64 queries\n"
         "serves best, above it one of 128. loss: time with tiles chosen so relative to the best ones, mean over\n"
         "the sizes; loss taken: with the tiles that the kernel takes.\n";
}

void tune(const TuneOptions& options) {
  const std::string reason = cuda_unusable_reason();
  if (!reason.empty()) throw InputError("a CUDA device is needed: " + reason);
  OutputFiles files;
  if (!options.json_out.empty()) files.reserve(options.json_out);
  const std::vector<Trial> trials = measure_all(options, problems_of(options));
  if (trials.empty()) {
    throw InputError(std::string("nothing to measure: ") + kTunedKernel +
                     " serves none of these; allowed: --head-dim up to 256, --group-size 1, 2, 4 and 8, and --block of "
                     "multiples of 64");
  }
  const std::string text = result_text(tune_json(options, trials));
  if (!options.json_out.empty()) files.write(options.json_out, std::as_bytes(std::span(text)));
  files.commit();
  if (options.json) {
    std::cout << text;
  } else {
    print_text(options, trials);
  }
}

void add_lists(CLI::App& command, TuneOptions& options) {
  const auto integers = [&](const char* flag, const char* help, std::int64_t high, std::vector<std::int64_t>& target) {
    add_list(command, flag, "INT", help, target,
             [flag, high](const std::string& word) { return parse_integer(flag, word, 1, high); })
        ->default_str(numbers_of(target))
        ->group(kInputGroup);
  };
  integers("--head-dim", "d, of Q, K and V", kMaxHeadDim, options.head_dims);
  integers("--group-size", "G; 1 is exact attention", kMaxHeadDim, options.group_sizes);
  integers("--block", "l, the rows of Q that share one order of columns", kAny, options.blocks);
  integers("--seq", "N, the length of Q and of K", kAny, options.seqs);
  integers("--heads", "H, the heads of Q, K and V", kAny, options.heads);
  std::vector<Strategy> allowed = all_settings();
  std::erase(allowed, Strategy::exact);
  const auto parse_strategy = [allowed](const std::string& word) {
    const auto strategy = parse_name<Strategy>("--strategy", word);
    if (std::find(allowed.begin(), allowed.end(), strategy) == allowed.end()) {
      throw InputError("--strategy: " + quoted(word) + " is not allowed; allowed: " + names_of(allowed, ", "));
    }
    return strategy;
  };
  add_list(command, "--strategy", names_of(allowed, "|"), "Of groups of more than one column", options.strategies,
           parse_strategy)
      ->default_str(names_of(options.strategies))
      ->group(kInputGroup);
  add_list(command, "--causal", all_names<Causal>("|"), "Causality", options.causals,
           [](const std::string& word) { return parse_name<Causal>("--causal", word); })
      ->default_str(names_of(options.causals))
      ->group(kInputGroup);
}

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* command = app.add_subcommand("tune", "The GPU's tiles and block lengths measured, beside the paper's rule");
  const auto options = std::make_shared<TuneOptions>();
  add_lists(*command, *options);
  const auto integer = [&](const char* flag, const char* help, std::int64_t high, const auto& store) {
    return add_integer(*command, flag, help, 1, high, store)->group(kInputGroup);
  };
  integer("--batch", "Batch entries [1]", kAny, [options](std::int64_t value) { options->batch = value; });
  integer("--repeats", "Timed runs of each, in turn [20]", 100000,
          [options](std::int64_t value) { options->repeats = static_cast<int>(value); });
  add_parsed(*command, "--dtype", "f16|bf16", "Of Q, K and V [bf16]", [options](const std::string& word) {
    if (word != "f16" && word != "bf16") {
      throw InputError("--dtype: " + quoted(word) + " is not allowed; allowed: f16, bf16");
    }
    options->dtype = parse_name<DType>("--dtype", word);
  })->group(kInputGroup);
  command->add_flag("--json", options->json, "Print one JSON object instead of tables")->group(kOutputGroup);
  add_path(*command, "--json-out", options->json_out, "FILE", "Write the JSON object")->group(kOutputGroup);
  command->footer("Example: distr tune --head-dim 64,128 --json-out tune.json");
  command->callback([options] { tune(*options); });
}

}  // namespace distr::cli
