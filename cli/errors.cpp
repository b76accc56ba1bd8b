// SPDX-License-Identifier: Apache-2.0
// `distr errors`: the errors of S_hat on uniform random Q and K, beside the paper's Tables 3 and 4, and its Figure 7.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "commands.h"
#include "error_maps.h"
#include "error_trials.h"
#include "gnuplot.h"
#include "options.h"
#include "output_files.h"
#include "progress.h"
#include "report.h"
#include "result_file.h"
#include "run_meta.h"
#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

constexpr std::int64_t kHeadDims[] = {32, 64};  // of the authors' script; of the paper's text
constexpr std::int64_t kMaxRows = 2048, kMaxTrials = 100000;
constexpr std::int64_t kPlotRows = 64, kPlotHeadDim = 32;  // of Figure 7

// Least, largest and mean over trials, in percent.
struct Summary {
  double min, max, mean;
};

// One column of a table of the paper.
struct PaperColumn {
  ErrorSetting setting;
  Summary printed;
};

// As printed: 4E-4, 2E-3, ... percent.
constexpr PaperColumn kTable3[] = {
    {{1, 2}, {4e-4, 3.45, 0.9}}, {{2, 2}, {2e-3, 3.4, 0.87}}, {{4, 2}, {2e-3, 3.4, 0.87}}, {{8, 2}, {1e-3, 3.4, 0.87}}};
constexpr PaperColumn kTable4[] = {{{2, 2}, {2e-3, 3.4, 0.87}},
                                   {{2, 4}, {4e-2, 5.4, 1.73}},
                                   {{2, 8}, {7e-2, 9.25, 2.48}},
                                   {{2, 16}, {6e-3, 16.5, 4.96}}};

struct PaperTable {
  int number;
  const char* title;
  std::span<const PaperColumn> columns;
};

constexpr PaperTable kTables[] = {{3, "the block size l varies, G = 2", kTable3},
                                  {4, "the group size G varies, l = 2", kTable4}};

const std::vector<Estimator> kBothEstimators = {Estimator::sample, Estimator::mean};

struct ErrorsOptions {
  std::int64_t rows = 64;
  std::int64_t trials = 100;
  std::uint64_t seed = 0;
  Projections projections = Projections::fresh;
  std::string json_out, plot;  // paths; empty: not wanted
  bool json = false;
};

struct ErrorRow {
  const PaperTable* table;
  const PaperColumn* column;
  std::int64_t head_dim;
  Estimator estimator;
  std::vector<double> signed_means, elementwise;  // of each trial
};

Summary summary_of(const std::vector<double>& values) {
  const auto [least, largest] = std::minmax_element(values.begin(), values.end());
  return {*least, *largest, std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size())};
}

void measure_trial(const ErrorTrials& trials, std::span<ErrorRow> rows) {
  for (std::size_t i = 0; i < rows.size(); i += kBothEstimators.size()) {
    const auto scores = trials.approximate(rows[i].column->setting, kBothEstimators);
    for (std::size_t e = 0; e < scores.size(); ++e) {
      const ErrorStatistics statistics = statistics_of(trials.exact(), scores[e]);
      rows[i + e].signed_means.push_back(statistics.signed_mean);
      rows[i + e].elementwise.push_back(statistics.elementwise);
    }
  }
}

// By table, then d, then setting, then estimator.
std::vector<ErrorRow> measure_all(const ErrorsOptions& options) {
  Progress progress;
  std::vector<ErrorRow> rows;
  std::int64_t done = 0;
  const auto total = options.trials * static_cast<std::int64_t>(std::size(kTables) * std::size(kHeadDims));
  for (const PaperTable& table : kTables) {
    for (const std::int64_t head_dim : kHeadDims) {
      const std::size_t first = rows.size();
      for (const PaperColumn& column : table.columns) {
        for (const Estimator estimator : kBothEstimators)
          rows.push_back({&table, &column, head_dim, estimator, {}, {}});
      }
      ErrorTrials trials(options.rows, head_dim, options.seed, options.projections);
      for (std::int64_t trial = 0; trial < options.trials; ++trial) {
        trials.draw();
        measure_trial(trials, std::span(rows).subspan(first));
        progress.show("trials", ++done, total);
      }
    }
  }
  return rows;
}

Json summary_json(const Summary& summary) {
  return {{"min", summary.min}, {"max", summary.max}, {"mean", summary.mean}};
}

Json errors_json(const ErrorsOptions& options, const std::vector<ErrorRow>& rows) {
  Json meta = run_meta(1);
  meta["seq"] = options.rows;
  meta["trials"] = options.trials;
  meta["seed"] = options.seed;
  meta["projections"] = options.projections == Projections::fresh ? "fresh" : "shared";
  meta["unit"] = "percent";
  meta["signed"] = "|mean (S_hat - S)| / mean S";
  meta["elementwise"] = "mean (|S_hat - S| / S)";
  Json json = {{"meta", meta}, {"rows", Json::array()}};
  for (const ErrorRow& row : rows) {
    json["rows"].push_back({{"impl", "distr"},
                            {"op", "scores"},
                            {"table", row.table->number},
                            {"head_dim", row.head_dim},
                            {"strategy", name_of(Strategy::lsh)},
                            {"estimator", name_of(row.estimator)},
                            {"block", row.column->setting.block},
                            {"group_size", row.column->setting.group_size},
                            {"signed", summary_json(summary_of(row.signed_means))},
                            {"elementwise", summary_json(summary_of(row.elementwise))},
                            {"paper", summary_json(row.column->printed)}});
  }
  return json;
}

void add_summary(std::vector<std::string>& cells, const Summary& summary) {
  for (const double value : {summary.min, summary.max, summary.mean}) cells.push_back(significant(value, 3));
}

void print_tables(const ErrorsOptions& options, const std::vector<ErrorRow>& rows) {
  std::cout << "Errors of S_hat in percent: " << options.trials
            << " trials, Q and K uniform in (0, 1), N = " << options.rows << ", lsh\n";
  for (const PaperTable& paper : kTables) {
    Table table;
    for (const char* head : {"d", "l", "G"}) table.add_column(head, Table::Align::right);
    table.add_column("estimator", Table::Align::left);
    for (const char* head :
         {"signed min", "max", "mean", "element-wise min", "max", "mean", "paper min", "max", "mean"}) {
      table.add_column(head, Table::Align::right);
    }
    for (const ErrorRow& row : rows) {
      if (row.table != &paper) continue;
      std::vector<std::string> cells = {std::to_string(row.head_dim), std::to_string(row.column->setting.block),
                                        std::to_string(row.column->setting.group_size), name_of(row.estimator)};
      add_summary(cells, summary_of(row.signed_means));
      add_summary(cells, summary_of(row.elementwise));
      for (const double value : {row.column->printed.min, row.column->printed.max, row.column->printed.mean}) {
        cells.push_back(general(value, 3));
      }
      table.add_row(std::move(cells));
    }
    std::cout << "\nThe paper's Table " << paper.number << ": " << paper.title << "\n\n";
    table.print(std::cout);
  }
  std::cout << "\nsigned: |mean over the matrix of (S_hat - S)| / mean S of each trial: what the paper prints, with\n"
               "sample; its text has d = 64, its authors' script d = 32. element-wise: mean of |S_hat - S| / S.\n";
}

std::string with_mean(const std::string& name, const std::vector<double>& percent) {
  const double mean = std::accumulate(percent.begin(), percent.end(), 0.0) / static_cast<double>(percent.size());
  return name + ", mean error " + significant(mean, 2) + " %";
}

std::vector<ErrorMap> error_maps(const ErrorTrials& trials, const PaperTable& table) {
  std::vector<ErrorMap> maps;
  for (const PaperColumn& column : table.columns) {
    std::vector<double> percent = trials.approximate(column.setting, {Estimator::sample}).front();
    for (std::size_t i = 0; i < percent.size(); ++i) {
      percent[i] = 100 * std::fabs(percent[i] - trials.exact()[i]) / trials.exact()[i];
    }
    const std::string name =
        "l = " + std::to_string(column.setting.block) + ", G = " + std::to_string(column.setting.group_size);
    const std::string title = with_mean(name, percent);
    maps.push_back({title, std::move(percent)});
  }
  return maps;
}

std::vector<std::byte> figure(const ErrorsOptions& options) {
  ErrorTrials trials(kPlotRows, kPlotHeadDim, options.seed, options.projections);
  trials.draw();
  ErrorPicture picture;
  picture.rows = kPlotRows;
  picture.exact = trials.exact();
  picture.approximate = trials.approximate({2, 2}, {Estimator::sample}).front();
  picture.approximate_title = "S\\\\_hat, l = 2, G = 2";
  picture.by_block = error_maps(trials, kTables[0]);
  picture.by_group = error_maps(trials, kTables[1]);
  return draw(picture, picture_format(options.plot));
}

void errors(const ErrorsOptions& options) {
  OutputFiles files;
  if (!options.plot.empty()) {
    static_cast<void>(picture_format(options.plot));
    require_gnuplot();
    files.reserve(options.plot);
  }
  if (!options.json_out.empty()) files.reserve(options.json_out);
  const std::vector<ErrorRow> rows = measure_all(options);
  const std::string text = result_text(errors_json(options, rows));
  if (!options.plot.empty()) files.write(options.plot, figure(options));
  if (!options.json_out.empty()) files.write(options.json_out, std::as_bytes(std::span(text)));
  files.commit();
  if (options.json) {
    std::cout << text;
  } else {
    print_tables(options, rows);
  }
}

}  // namespace

void add_errors(CLI::App& app) {
  CLI::App* command = app.add_subcommand("errors", "The errors of S_hat in the paper's Tables 3 and 4 and Figure 7");
  const auto options = std::make_shared<ErrorsOptions>();
  add_integer(*command, "--seq", "N, the rows of Q and K", 1, kMaxRows, [options](std::int64_t value) {
    options->rows = value;
  })->default_str(std::to_string(options->rows));
  add_integer(*command, "--trials", "Draws of Q, K and the projections", 1, kMaxTrials, [options](std::int64_t value) {
    options->trials = value;
  })->default_str(std::to_string(options->trials));
  add_parsed(*command, "--seed", "INT", "Of the trials", [options](const std::string& word) {
    options->seed = parse_unsigned("--seed", word);
  })->default_str(std::to_string(options->seed));
  add_parsed(*command, "--projections", "fresh|shared", "New ones in each trial, or, as the authors, one for all",
             [options](const std::string& word) {
               if (word != "fresh" && word != "shared") {
                 throw InputError("--projections: " + quoted(word) + " is unknown; allowed: fresh, shared");
               }
               options->projections = word == "fresh" ? Projections::fresh : Projections::shared;
             })
      ->default_str(options->projections == Projections::fresh ? "fresh" : "shared");
  command->add_flag("--json", options->json, "Print one JSON object instead of tables")->group(kOutputGroup);
  add_path(*command, "--json-out", options->json_out, "FILE", "Write the JSON object")->group(kOutputGroup);
  add_path(*command, "--plot", options->plot, "FILE.png|svg",
           "Draw Figure 7: S, S_hat and maps of the error (N 64, d 32)")
      ->group(kOutputGroup);
  command->footer("Example: distr errors --plot errors.png");
  command->callback([options] { errors(*options); });
}

}  // namespace distr::cli
