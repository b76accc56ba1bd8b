// SPDX-License-Identifier: Apache-2.0
// `distr bench`: times, rates and errors over a sweep of shapes, on random values.
#include <algorithm>
#include <array>
#include <cstring>
#include <iostream>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "commands.h"
#include "comparison.h"
#include "memory.h"
#include "options.h"
#include "output_files.h"
#include "random_inputs.h"
#include "report.h"
#include "result_file.h"
#include "run_meta.h"
#include "settings.h"
#include "stream_bench.h"
#include "text.h"

namespace distr::cli {
namespace {

constexpr std::int64_t kErrorPairs = 1 << 22;  // scores that errors of P are taken from, about

struct BenchOptions {
  RunOptions run;
  SettingLists settings;
  StreamFlags stream;
  bool streams = false;
  std::optional<int> stream_from;  // empty: host memory
  std::vector<std::int64_t> seqs{1024, 2048, 4096};
  std::vector<std::int64_t> head_dims{64, 128};
  std::vector<DType> dtypes{DType::f32};
  std::vector<Causal> causals{Causal::none};
  std::vector<Work> works{Work::forward};
  std::int64_t batch = 1, heads = 4, heads_kv = 0;  // 0: as heads
  std::string json_out;                             // path; empty: not wanted
  bool json = false;
  bool nondeterministic = false;
};

constexpr std::array kWorks{Named<Work>{Work::grouping, "grouping"}, Named<Work>{Work::forward, "forward"},
                            Named<Work>{Work::backward, "backward"},
                            Named<Work>{Work::forward_backward, "forward-backward"}};

std::string works(const char* separator) {
  std::string names;
  for (const auto& row : kWorks) names += (names.empty() ? "" : separator) + std::string(row.name);
  return names;
}

Work parse_work(const std::string& word) {
  for (const auto& [work, name] : kWorks) {
    if (word == name) return work;
  }
  throw InputError("--op: " + quoted(word) + " is unknown; allowed: " + works(", "));
}

struct Sweep {
  const BenchOptions& options;
  Device device;
  double peak;    // operations a second; 0 on a GPU, whose peak is not measured
  bool has_near;  // whether there are near keys to tell of
  Json rows = Json::array();
  Table table{};
};

void add_columns(Table& table, bool has_near) {
  for (const char* head : {"op", "dtype", "causal", "strategy"}) table.add_column(head, Table::Align::left);
  for (const char* head :
       {"N", "d", "G", "ms", "min", "max", "grouping", "GFLOP/s", "% of peak", "ratio", "O error", "memory MB"}) {
    table.add_column(head, Table::Align::right);
  }
  if (has_near) add_near_columns(table);
}

void add_rows(Sweep& sweep, const Problem& problem, Work work, const std::vector<Row>& rows,
              const std::vector<std::int64_t>& memory) {
  const double operations = exact_operations(problem, work);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const bool products = work != Work::grouping;  // else there is no rate, and exact attention takes no time
    const double rate = operations / (row.median() * 1e-3);
    Json json = row_json(problem, row, rows.front().median());
    json["tflops_exact_flops"] = products ? Json(rate * 1e-12) : Json(nullptr);
    const bool has_share = products && sweep.peak > 0;
    json["share_of_fma_peak"] = has_share ? Json(rate / sweep.peak) : Json(nullptr);
    if (!products) json["ratio_to_exact"] = nullptr;
    json["peak_memory_bytes"] = memory[i];
    sweep.rows.push_back(json);
    const bool exact = row.grouping.strategy == Strategy::exact;
    std::string strategy = name_of(row.grouping.strategy);
    if (traits(row.grouping.strategy).has_estimator) strategy += std::string(" ") + name_of(row.grouping.estimator);
    std::vector<std::string> cells{json["op"].get<std::string>(),
                                   name_of(problem.dtype),
                                   name_of(problem.causal),
                                   strategy,
                                   std::to_string(problem.seq_q),
                                   std::to_string(problem.head_dim),
                                   exact ? "-" : std::to_string(row.grouping.group_size),
                                   significant(row.median()),
                                   significant(row.milliseconds.front(), 3),
                                   significant(row.milliseconds.back(), 3),
                                   exact ? "-" : significant(row.median_grouping(), 3),
                                   products ? significant(rate * 1e-9, 3) : "-",
                                   has_share ? significant(100 * rate / sweep.peak, 3) : "-",
                                   products ? significant(rows.front().median() / row.median(), 3) : "-",
                                   significant(row.errors.output_frobenius, 3),
                                   significant(static_cast<double>(memory[i]) / 1e6, 3)};
    if (sweep.has_near) {
      for (std::string& cell : near_cells(row)) cells.push_back(std::move(cell));
    }
    sweep.table.add_row(std::move(cells));
  }
}

void bench_problem(Sweep& sweep, const Problem& problem, Work work) {
  const BenchOptions& options = sweep.options;
  const std::vector<Grouping> settings = settings_of(options.settings, problem.head_dim, options.run.seed);
  for (const Grouping& setting : settings) validate(problem, setting);
  const Inputs inputs = random_inputs(problem, options.run.seed);
  Comparison comparison(inputs, work, sweep.device, options.run.threads);
  comparison.computation().execution().deterministic = !options.nondeterministic;
  std::vector<std::int64_t> memory;
  for (const Grouping& setting : settings) {
    comparison.computation().release();
    const PeakMemory peak;
    comparison.warm_up({setting});
    memory.push_back(sweep.device == Device::cpu ? peak.bytes() : comparison.computation().extra_bytes());
  }
  std::vector<Row> rows = comparison.errors(settings, Truth::same_device, kErrorPairs / problem.seq_k);
  comparison.time(rows, options.settings.repeats_on(sweep.device));
  add_rows(sweep, problem, work, rows, memory);
}

std::vector<Problem> problems_of(const BenchOptions& options) {
  std::vector<Problem> problems;
  for (const DType dtype : options.dtypes) {
    for (const Causal causal : options.causals) {
      for (const std::int64_t head_dim : options.head_dims) {
        for (const std::int64_t seq : options.seqs) {
          Problem problem;
          problem.dtype = dtype;
          problem.batch = options.batch;
          problem.heads_q = options.heads;
          problem.heads_kv = options.heads_kv == 0 ? options.heads : options.heads_kv;
          problem.seq_q = problem.seq_k = seq;
          problem.head_dim = problem.head_dim_v = head_dim;
          problem.scale = options.run.scale;
          problem.softcap = options.run.softcap;
          problem.causal = causal;
          options.run.window_size.set(problem, std::nullopt);
          validate_random(problem);
          problems.push_back(contiguous(problem));
        }
      }
    }
  }
  return problems;
}

// --nondeterministic is for what has another order of summation.
void require_choice_of_order(const BenchOptions& options) {
  const bool has_backward = std::any_of(options.works.begin(), options.works.end(), [](Work work) {
    return work == Work::backward || work == Work::forward_backward;
  });
  if (options.nondeterministic && (options.run.device != Device::cuda || !has_backward)) {
    throw InputError(
        "--nondeterministic: there is but one order of summation; allowed: with --device cuda, and "
        "backward or forward-backward in --op");
  }
}

void write_results(const BenchOptions& options, OutputFiles& files, const std::string& text) {
  if (!options.json_out.empty()) files.write(options.json_out, std::as_bytes(std::span(text)));
  files.commit();
  if (options.json) std::cout << text;
}

void bench_streams(const BenchOptions& options) {
  if (options.works != std::vector{Work::forward} || options.nondeterministic) {
    throw InputError("--stream: another --op, or --nondeterministic; allowed: --op forward");
  }
  if (options.stream_from.has_value() && options.stream.devices.empty()) {
    throw InputError("--from without --devices; allowed: with the GPUs that share the work");
  }
  const Device device = require_stream_device(options.stream, options.run);
  if (options.stream_from.has_value() && *options.stream_from >= cuda_device_count()) {
    throw InputError("--from: " + std::to_string(*options.stream_from) + " is no GPU of this machine; allowed: 0 to " +
                     std::to_string(cuda_device_count() - 1));
  }
  OutputFiles files;
  if (!options.json_out.empty()) files.reserve(options.json_out);
  const StreamOptions how = stream_options(options.stream, options.run, device);
  const int repeats = options.settings.repeats.value_or(5);
  Json rows = Json::array();
  Table table;
  add_stream_columns(table);
  for (const Problem& problem : problems_of(options)) {
    const std::vector<Grouping> settings = settings_of(options.settings, problem.head_dim, options.run.seed);
    bench_streamed(problem, settings, how, options.stream_from, repeats, options.run.seed, rows, table);
  }
  const Json meta = run_meta(options.run.threads, device);
  write_results(options, files, result_text({{"meta", meta}, {"rows", rows}}));
  if (options.json) return;
  std::cout << "B " << options.batch << ", H " << options.heads << ", from "
            << (options.stream_from.has_value() ? "the memory of GPU " + std::to_string(*options.stream_from)
                                                : std::string("host memory"))
            << "\n\n";
  table.print(std::cout);
  std::cout << "\nms: median of " << repeats
            << " runs, wall time; copies: of the same run without attention; compute: without copies.\n";
}

void bench(const BenchOptions& options) {
  if (options.streams) return bench_streams(options);
  if (options.stream.any()) {
    throw InputError("--devices or --chunk-heads without --stream; allowed: with --stream");
  }
  if (options.stream_from.has_value()) throw InputError("--from without --stream; allowed: with --stream");
  require_choice_of_order(options);
  const Device device = require_device(options.run.device);
  OutputFiles files;
  if (!options.json_out.empty()) files.reserve(options.json_out);
  const std::vector<Problem> problems = problems_of(options);
  Execution execution;
  execution.threads = options.run.threads;
  const auto& windows = options.settings.windows;
  const bool has_near =
      options.settings.sinks > 0 ||
      std::any_of(windows.begin(), windows.end(), [](const auto& window) { return window.has_value(); });
  Sweep sweep{options, device, device == Device::cpu ? fma_peak(execution) : 0, has_near};
  add_columns(sweep.table, has_near);
  for (const Work work : options.works) {
    for (const Problem& problem : problems) bench_problem(sweep, problem, work);
  }
  Json meta = run_meta(options.run.threads, device);
  meta["fma_peak_gflops"] = device == Device::cpu ? Json(sweep.peak * 1e-9) : Json(nullptr);
  write_results(options, files, result_text({{"meta", meta}, {"rows", sweep.rows}}));
  if (options.json) return;
  std::cout << "B " << options.batch << ", H " << options.heads << ", ";
  if (device == Device::cpu) {
    std::cout << meta["threads"] << " threads, peak " << significant(sweep.peak * 1e-9)
              << " GFLOP/s of fp32 multiply-adds\n\n";
  } else {
    std::cout << meta["gpu"].get<std::string>() << "\n\n";
  }
  sweep.table.print(std::cout);
  std::cout
      << "\nms: median of " << options.settings.repeats_on(device)
      << " runs of all that a user waits for (backward: without order and forward);\n"
         "grouping: what that takes of it.\n"
         "GFLOP/s counts the products of exact attention, so that rates of one shape compare; ratio: time of exact /\n"
         "this time. memory: the largest growth of the process beyond inputs and outputs; on a GPU order and\n"
         "workspace.\n"
      << (has_near
              ? "kept: of the far halves of tiles (64 rows, 64 keys) in which a row sees a far key, the share that is "
                "not\nskipped.\n"
              : "");
}

void add_sweep_options(CLI::App& command, BenchOptions& options) {
  const auto integers = [&](const char* flag, const char* help, std::int64_t high, std::vector<std::int64_t>& target) {
    add_list(command, flag, "INT", help, target,
             [flag, high](const std::string& word) { return parse_integer(flag, word, 1, high); })
        ->default_str(numbers_of(target))
        ->group(kInputGroup);
  };
  integers("--seq", "N, the length of Q and of K", kAny, options.seqs);
  integers("--head-dim", "d, of Q, K and V", kMaxHeadDim, options.head_dims);
  add_list(command, "--dtypes", all_names<DType>("|"), "The types computed in", options.dtypes,
           [](const std::string& word) { return parse_name<DType>("--dtypes", word); })
      ->default_str(names_of(options.dtypes))
      ->group(kInputGroup);
  add_list(command, "--causal", all_names<Causal>("|"), "Causality", options.causals,
           [](const std::string& word) { return parse_name<Causal>("--causal", word); })
      ->default_str(names_of(options.causals))
      ->group(kInputGroup);
  add_list(command, "--op", works("|"), "What is timed", options.works, parse_work)
      ->default_str(name_in(kWorks, options.works.front()))
      ->group(kInputGroup);
  add_window_size_option(command, options.run.window_size)->group(kInputGroup);
  add_softcap_option(command, options.run.softcap)->group(kInputGroup);
  const auto integer = [&](const char* flag, const char* help, std::int64_t& target) {
    add_integer(command, flag, help, 1, kAny, [&target](std::int64_t value) { target = value; })->group(kInputGroup);
  };
  integer("--batch", "Batch entries [1]", options.batch);
  integer("--heads", "Heads of Q [4]", options.heads);
  integer("--heads-kv", "Heads of K and V [as --heads]", options.heads_kv);
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Time, rate and error over a sweep of shapes, on random values");
  const auto options = std::make_shared<BenchOptions>();
  options->settings.estimators = {Estimator::mean};
  add_sweep_options(*command, *options);
  command->add_flag("--json", options->json, "Print one JSON object instead of a table")->group(kOutputGroup);
  add_path(*command, "--json-out", options->json_out, "FILE", "Write the JSON object")->group(kOutputGroup);
  add_setting_options(*command, options->settings);
  add_execution_options(*command, options->run);
  command
      ->add_flag("--nondeterministic", options->nondeterministic,
                 "A quicker backward on a GPU, whose dQ is not summed in the same order in every run")
      ->group(kRunGroup);
  command
      ->add_flag("--stream", options->streams, "The forward from host memory, beside its copies and its kernels alone")
      ->group(kRunGroup);
  add_stream_flags(*command, options->stream);
  add_integer(*command, "--from", "With --stream: from the memory of this GPU instead", 0, kMostDevices,
              [options](std::int64_t value) { options->stream_from = static_cast<int>(value); })
      ->group(kRunGroup);
  command->footer("Example: distr bench --seq 2048,4096 --op forward,backward --json-out bench.json");
  command->callback([options] { bench(*options); });
}

}  // namespace distr::cli
