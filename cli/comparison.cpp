// SPDX-License-Identifier: Apache-2.0
#include "comparison.h"

#include <algorithm>

#include "options.h"

namespace distr::cli {
namespace {

const char* work_name(Work work) {
  switch (work) {
    case Work::grouping:
      return "grouping";
    case Work::forward:
      return "forward";
    case Work::backward:
      return "backward";
    case Work::forward_backward:
      break;
  }
  return "forward_backward";
}

Operation operation_of(Work work) {
  return work == Work::grouping  ? Operation::grouping
         : work == Work::forward ? Operation::forward
                                 : Operation::backward;
}

Computation::Outputs outputs_of(Work work) {
  const bool has_gradients = work == Work::backward || work == Work::forward_backward;
  return has_gradients ? Computation::Outputs::gradients : Computation::Outputs::o;
}

}  // namespace

double Row::median_of(const std::vector<double>& values) {
  const std::size_t middle = values.size() / 2;
  const bool odd = values.size() % 2 == 1;
  return odd ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Comparison::Comparison(const Inputs& inputs, Work work, Device device, int threads)
    : inputs_(inputs), work_(work), computation_(inputs, outputs_of(work), device, threads) {}

void Comparison::find_order(const Plan& plan) {
  if (plan.reads_order()) computation_.make_order(plan);
}

Comparison::Lap Comparison::run_once(const Grouping& grouping) {
  if (work_ == Work::backward) {
    const Plan plan = computation_.decide(Operation::forward, grouping);
    find_order(plan);
    computation_.forward(plan);
  }
  computation_.flush_caches();
  computation_.mark();
  const Plan plan = computation_.decide(operation_of(work_), grouping);
  if (work_ != Work::backward) find_order(plan);
  computation_.mark();
  if (work_ == Work::forward || work_ == Work::forward_backward) computation_.forward(plan);
  if (work_ == Work::backward || work_ == Work::forward_backward) computation_.backward(plan);
  computation_.mark();
  const std::vector<double> laps = computation_.laps();
  return {laps.at(0) + laps.at(1), laps.at(0)};
}

void Comparison::warm_up(const std::vector<Grouping>& settings) {
  for (const Grouping& grouping : settings) static_cast<void>(run_once(grouping));
}

std::vector<std::byte> Comparison::exact_output(const Grouping& exact, Truth truth) {
  const bool elsewhere = truth == Truth::cpu && computation_.execution().device != Device::cpu;
  if (!elsewhere) {
    computation_.forward(computation_.decide(Operation::forward, exact));
    return computation_.o();
  }
  Computation cpu(inputs_, Computation::Outputs::o, Device::cpu, computation_.execution().threads);
  cpu.execution().progress = computation_.execution().progress;
  cpu.forward(cpu.decide(Operation::forward, exact));
  return cpu.take_o();
}

std::vector<Row> Comparison::errors(const std::vector<Grouping>& settings, Truth truth, std::int64_t max_rows) {
  Progress progress;
  std::vector<Row> rows;
  rows.reserve(settings.size());
  Execution& execution = computation_.execution();
  const Operation operation = operation_of(work_);
  for (const Grouping& grouping : settings) {
    const Plan plan = computation_.decide(operation, grouping);
    rows.push_back({work_, plan.grouping(), plan.kernel().name, {}, {}, {}, {}});
  }
  execution.progress = progress.step("exact attention");
  const std::vector<std::byte> o_exact = exact_output(settings.front(), truth);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string label = "error of setting " + std::to_string(i + 1) + " of " + std::to_string(rows.size());
    execution.progress = progress.step(label);
    if (i == 0 && (truth == Truth::same_device || execution.device == Device::cpu)) continue;
    const Plan plan = computation_.decide(Operation::forward, rows[i].grouping);
    find_order(plan);
    if (rows[i].grouping.skip > 0) {
      computation_.forward_counting(plan);
      rows[i].kept_share = kept_share(computation_.halves());
    } else {
      computation_.forward(plan);
    }
    const std::vector<std::int32_t> order = computation_.order();
    const std::vector<float> key_means = computation_.key_means();
    std::vector<std::byte> o = computation_.o();
    ForwardTensors tensors = inputs_.tensors();
    tensors.order = order.data();
    tensors.key_means = key_means.data();
    tensors.o = o.data();
    Execution on_cpu;
    on_cpu.threads = execution.threads;
    on_cpu.progress = execution.progress;
    rows[i].errors = measure(inputs_.problem, rows[i].grouping, tensors, o_exact.data(), max_rows, on_cpu);
  }
  execution.progress = nullptr;
  return rows;
}

void Comparison::time(std::vector<Row>& rows, int repeats) {
  Progress progress;
  const auto total = static_cast<std::int64_t>(rows.size()) * repeats;
  std::int64_t done = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (Row& row : rows) {
      const Lap lap = run_once(row.grouping);
      row.milliseconds.push_back(lap.all);
      row.milliseconds_grouping.push_back(lap.grouping);
      progress.show("timing", ++done, total);
    }
  }
  for (Row& row : rows) {
    std::sort(row.milliseconds.begin(), row.milliseconds.end());
    std::sort(row.milliseconds_grouping.begin(), row.milliseconds_grouping.end());
  }
}

std::vector<double> Comparison::probabilities_of(const Grouping& grouping, std::int64_t batch, std::int64_t head,
                                                 std::int64_t size, std::int64_t& rows, std::int64_t& columns) {
  find_order(computation_.decide(Operation::forward, grouping));
  const std::vector<std::int32_t> order = computation_.order();
  const std::vector<float> key_means = computation_.key_means();
  ForwardTensors tensors = inputs_.tensors();
  tensors.order = order.data();
  tensors.key_means = key_means.data();
  return probabilities(inputs_.problem, grouping, tensors, batch, head, size, rows, columns);
}

bool has_near_keys(const std::vector<Row>& rows) {
  return std::any_of(rows.begin(), rows.end(),
                     [](const Row& row) { return row.grouping.window.has_value() || row.grouping.sinks > 0; });
}

void add_near_columns(Table& table) {
  for (const char* head : {"window", "sinks", "skip", "kept"}) table.add_column(head, Table::Align::right);
}

std::vector<std::string> near_cells(const Row& row) {
  const Grouping& grouping = row.grouping;
  const std::string finish = grouping.finish ? " finish" : "";
  return {grouping.window.has_value() ? std::to_string(*grouping.window) : "-",
          grouping.sinks > 0 ? std::to_string(grouping.sinks) : "-",
          grouping.skip > 0 ? general(grouping.skip, 4) + finish : "-",
          row.kept_share.has_value() ? significant(*row.kept_share, 3) : "-"};
}

Json row_json(const Problem& problem, const Row& row, double exact_ms) {
  Json json = {{"impl", "distr"}, {"kernel", row.kernel}, {"op", work_name(row.work)}};
  json.update(sizes_json(problem));
  json.update(grouping_json(problem, row.grouping));
  json["ms"] = row.median();
  json["ms_min"] = row.milliseconds.front();
  json["ms_max"] = row.milliseconds.back();
  json["runs"] = row.milliseconds.size();
  json["ms_grouping"] = row.median_grouping();
  json["ratio_to_exact"] = exact_ms / row.median();
  json["rel_error_out"] = row.errors.output_frobenius;
  json["row_cosine_min"] = row.errors.row_cosine_min;
  json["total_variation"] = row.errors.total_variation;
  json["score_error_elementwise"] = row.errors.score_elementwise;
  json["score_error_signed"] = row.errors.score_signed;
  json["rows_measured"] = row.errors.rows;
  json["kept_share"] = row.kept_share.has_value() ? Json(*row.kept_share) : Json(nullptr);
  return json;
}

}  // namespace distr::cli
