// SPDX-License-Identifier: Apache-2.0
// `distr compare`: exact attention against a list of settings, in time and in error.
#include <cmath>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "commands.h"
#include "comparison.h"
#include "distr/version.h"
#include "gnuplot.h"
#include "options.h"
#include "output_files.h"
#include "plot.h"
#include "report.h"
#include "result_file.h"
#include "run_meta.h"
#include "settings.h"
#include "text.h"

namespace distr::cli {
namespace {

constexpr std::int64_t kPlotSize = 128;  // of the heat maps, at most

struct CompareOptions {
  InputOptions input;
  RunOptions run;
  SettingLists settings;
  std::string json_out, plot;  // paths; empty: not wanted
  std::int64_t plot_batch = 0, plot_head = 0;
  std::int64_t plot_setting = 1;  // a row of the table; 0 is exact
  bool json = false;
};

Json comparison_json(const CompareOptions& options, const Inputs& inputs, const std::vector<Row>& rows) {
  const Device device = choose_device(options.run.device);
  Json meta = run_meta(options.run.threads, device);
  meta["device"] = name_of(device);
  meta["inputs"] = inputs.paths;
  meta.update(sizes_json(inputs.problem));
  meta["causal_corner"] = name_of(inputs.problem.causal);
  meta["mask"] = name_of(inputs.problem.mask.kind);
  meta["scale"] = inputs.problem.softmax_scale();
  meta["seed"] = options.run.seed;
  meta["repeats"] = options.settings.repeats_on(device);
  Json json = {{"meta", meta}, {"rows", Json::array()}};
  for (const Row& row : rows) json["rows"].push_back(row_json(inputs.problem, row, rows.front().median()));
  return json;
}

void print_table(const Inputs& inputs, Device device, const std::vector<Row>& rows) {
  Table table;
  table.add_column("#", Table::Align::right);
  for (const char* head : {"strategy", "estimator", "order"}) table.add_column(head, Table::Align::left);
  for (const char* head : {"G", "l", "ms", "min", "max", "grouping", "ratio", "O error", "min cosine", "TV of P",
                           "|S| error", "signed S error"}) {
    table.add_column(head, Table::Align::right);
  }
  const bool has_near = has_near_keys(rows);
  if (has_near) add_near_columns(table);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const Grouping& grouping = row.grouping;
    const bool exact = grouping.strategy == Strategy::exact;
    std::vector<std::string> cells{std::to_string(i),
                                   name_of(grouping.strategy),
                                   traits(grouping.strategy).has_estimator ? name_of(grouping.estimator) : "-",
                                   exact ? "-" : name_of(grouping.order_from),
                                   exact ? "-" : std::to_string(grouping.group_size),
                                   exact ? "-" : std::to_string(grouping.block),
                                   significant(row.median()),
                                   significant(row.milliseconds.front()),
                                   significant(row.milliseconds.back()),
                                   exact ? "-" : significant(row.median_grouping(), 3),
                                   significant(rows.front().median() / row.median(), 3),
                                   significant(row.errors.output_frobenius, 3),
                                   significant(row.errors.row_cosine_min, 3),
                                   significant(row.errors.total_variation, 3),
                                   significant(row.errors.score_elementwise, 3),
                                   significant(row.errors.score_signed, 3)};
    if (has_near) {
      for (std::string& cell : near_cells(row)) cells.push_back(std::move(cell));
    }
    table.add_row(std::move(cells));
  }
  std::cout << sizes_text(inputs.problem) << "; kernel " << rows.front().kernel << "\n\n";
  table.print(std::cout);
  std::cout
      << "\nms: median time of " << rows.front().milliseconds.size()
      << " runs of grouping and attention, with the least and the most, and what the grouping takes of it;\n"
         "ratio: time of exact / this time."
      << (device == Device::cuda ? " Errors are against exact attention on the CPU.\n" : "\n")
      << "O error: |O - O exact| / |O exact| (Frobenius); min cosine: smallest between a row of O and of O exact.\n"
         "TV of P: mean over rows of half the sum of |P - P exact|, 0 to 1.\n"
         "|S| error: mean |S - S exact| / mean |S exact|; signed S error: |mean (S - S exact)| / mean |S exact|.\n"
      << (has_near ? "kept: of the far halves of tiles (64 rows, 64 keys) in which a row sees a far key, the share "
                     "that is not "
                     "skipped.\n"
                   : "");
}

// What tells a setting from the others: without the parts that all have in common.
PlotPoint point_of(const CompareOptions& options, const Row& row) {
  const Grouping& grouping = row.grouping;
  PlotPoint point{name_of(grouping.strategy), "exact", row.median(), row.errors.output_frobenius};
  if (grouping.strategy == Strategy::exact) return point;
  if (traits(grouping.strategy).has_estimator) point.series += std::string(", ") + name_of(grouping.estimator);
  if (options.settings.blocks.size() > 1) point.series += ", l=" + std::to_string(grouping.block);
  if (options.settings.orders.size() > 1) point.series += std::string(", ") + name_of(grouping.order_from);
  if (options.settings.windows.size() > 1 || options.settings.skips.size() > 1) point.series += near_text(grouping);
  point.label = "G=" + std::to_string(grouping.group_size);
  return point;
}

void require_values(const Problem& problem) {
  if (problem.batch == 0 || problem.seq_q == 0 || problem.seq_k == 0) {
    throw InputError("nothing to compare: " + sizes_text(problem) + "; allowed: B, Nq and Nk above 0");
  }
}

void require_plottable(const CompareOptions& options, const Problem& problem, std::size_t row_count) {
  const auto require = [](const char* flag, std::int64_t value, std::int64_t count) {
    if (value >= count) {
      throw InputError(std::string(flag) + ": " + std::to_string(value) + " is not allowed; allowed: 0 to " +
                       std::to_string(count - 1));
    }
  };
  require("--plot-batch", options.plot_batch, problem.batch);
  require("--plot-head", options.plot_head, problem.heads_q);
  require("--plot-setting", options.plot_setting, static_cast<std::int64_t>(row_count));
}

std::vector<std::byte> plot(const CompareOptions& options, const Inputs& inputs, Comparison& comparison,
                            const std::vector<Row>& rows) {
  const Row& shown = rows[static_cast<std::size_t>(options.plot_setting)];
  const auto heatmap = [&](const Row& row, Picture& picture) {
    return comparison.probabilities_of(row.grouping, options.plot_batch, options.plot_head, kPlotSize, picture.rows,
                                       picture.columns);
  };
  Picture picture;
  picture.exact = heatmap(rows.front(), picture);
  picture.approximate = heatmap(shown, picture);
  picture.seq_q = inputs.problem.seq_q;
  picture.seq_k = inputs.problem.seq_k;
  picture.head = "batch " + std::to_string(options.plot_batch) + ", head " + std::to_string(options.plot_head);
  picture.setting = grouping_text(shown.grouping);
  picture.error_title = "Error and time, all heads";
  for (const Row& row : rows) {
    if (std::isfinite(row.errors.output_frobenius)) picture.points.push_back(point_of(options, row));
  }
  return draw(picture, picture_format(options.plot));
}

void compare(const CompareOptions& options) {
  const Device device = require_device(options.run.device);
  OutputFiles files;
  const InputOptions& input = options.input;
  for (const std::string* path : {&input.q, &input.k, &input.v, &input.mask, &input.file}) files.keep(*path);
  if (!options.plot.empty()) {
    static_cast<void>(picture_format(options.plot));
    require_gnuplot();
    files.reserve(options.plot);
  }
  if (!options.json_out.empty()) files.reserve(options.json_out);
  Inputs inputs = read_inputs(options.input, options.run);
  options.run.window_size.set(inputs.problem, options.settings.key_offset);
  require_values(inputs.problem);
  const std::vector<Grouping> settings = settings_of(options.settings, inputs.problem.head_dim, options.run.seed);
  for (const Grouping& setting : settings) validate(inputs.problem, setting);
  if (!options.plot.empty()) require_plottable(options, inputs.problem, settings.size());
  Comparison comparison(inputs, Work::forward, device, options.run.threads);
  comparison.warm_up(settings);
  std::vector<Row> rows = comparison.errors(settings, Truth::cpu);
  comparison.time(rows, options.settings.repeats_on(device));
  const std::string text = result_text(comparison_json(options, inputs, rows));
  if (!options.plot.empty()) files.write(options.plot, plot(options, inputs, comparison, rows));
  if (!options.json_out.empty()) files.write(options.json_out, std::as_bytes(std::span(text)));
  files.commit();
  if (options.json) {
    std::cout << text;
  } else {
    print_table(inputs, device, rows);
  }
}

void add_output_options(CLI::App& command, CompareOptions& options) {
  const auto add_index = [&command](const char* flag, const char* help, std::int64_t& target) {
    add_integer(command, flag, help, 0, kAny, [&target](std::int64_t value) { target = value; })
        ->default_str(std::to_string(target))
        ->group(kOutputGroup);
  };
  command.add_flag("--json", options.json, "Print one JSON object instead of a table")->group(kOutputGroup);
  add_path(command, "--json-out", options.json_out, "FILE", "Write the JSON object")->group(kOutputGroup);
  add_path(command, "--plot", options.plot, "FILE.png|svg",
           "Draw P exact, approximate and their difference, and error against time")
      ->group(kOutputGroup);
  add_index("--plot-setting", "The approximate row of the table that is drawn", options.plot_setting);
  add_index("--plot-batch", "The batch entry that is drawn", options.plot_batch);
  add_index("--plot-head", "The head that is drawn", options.plot_head);
}

}  // namespace

void add_compare(CLI::App& app) {
  CLI::App* command = app.add_subcommand("compare", "Exact attention against approximate settings: time and error");
  const auto options = std::make_shared<CompareOptions>();
  add_input_options(*command, options->input);
  add_output_options(*command, *options);
  add_setting_options(*command, options->settings);
  add_run_options(*command, options->run);
  command->footer(
      "The settings are all combinations of the lists.\n"
      "Example: distr compare --input qkv.safetensors --group-size 2,4 --plot compare.png");
  command->callback([options] { compare(*options); });
}

}  // namespace distr::cli
