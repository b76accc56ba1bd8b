// SPDX-License-Identifier: Apache-2.0
#include "comparison.h"

#include <algorithm>
#include <chrono>

#include "options.h"

namespace distr::cli {
namespace {

const char* name_of(Work work) {
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

}  // namespace

double Row::median() const {
  const std::size_t middle = milliseconds.size() / 2;
  const bool odd = milliseconds.size() % 2 == 1;
  return odd ? milliseconds[middle] : (milliseconds[middle - 1] + milliseconds[middle]) / 2;
}

Comparison::Comparison(const Inputs& inputs, Work work, Device device, int threads) : inputs_(inputs), work_(work) {
  execution_.device = device;
  execution_.threads = threads;
  const Problem& problem = inputs.problem;
  const std::int64_t o_shape[] = {problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v};
  o_.resize(static_cast<std::size_t>(count_of(o_shape)) * size_of(problem.dtype));
  if (work == Work::backward || work == Work::forward_backward) {
    const std::int64_t lse_shape[] = {problem.batch, problem.heads_q, problem.seq_q};
    lse_.resize(static_cast<std::size_t>(count_of(lse_shape)) * size_of(problem.lse_dtype()));
    d_q_.resize(inputs.q.size());
    d_k_.resize(inputs.k.size());
    d_v_.resize(inputs.v.size());
  }
}

void Comparison::find_order(const Grouping& grouping) {
  if (!reads_order(grouping)) return;
  order_.resize(static_cast<std::size_t>(count_of(order_shape(inputs_.problem, grouping))));
  make_grouping(inputs_.problem, grouping, {inputs_.q.data(), inputs_.k.data(), order_.data()}, execution_);
}

void Comparison::forward_once(const Grouping& grouping) {
  ForwardTensors tensors = inputs_.tensors();
  tensors.order = order_.data();
  tensors.o = o_.data();
  tensors.lse = lse_.empty() ? nullptr : lse_.data();
  forward(inputs_.problem, grouping, tensors, execution_);
}

void Comparison::backward_once(const Grouping& grouping) {
  const ForwardTensors inputs = inputs_.tensors();
  BackwardTensors tensors;
  tensors.q = inputs.q;
  tensors.k = inputs.k;
  tensors.v = inputs.v;
  tensors.mask = inputs.mask;
  tensors.order = order_.data();
  tensors.o = tensors.d_o = o_.data();  // any upstream gradient takes the same time
  tensors.lse = lse_.data();
  tensors.d_q = d_q_.data();
  tensors.d_k = d_k_.data();
  tensors.d_v = d_v_.data();
  backward(inputs_.problem, grouping, tensors, execution_);
}

void Comparison::work_once(const Grouping& grouping) {
  if (work_ != Work::backward) find_order(grouping);
  if (work_ == Work::forward || work_ == Work::forward_backward) forward_once(grouping);
  if (work_ == Work::backward || work_ == Work::forward_backward) backward_once(grouping);
}

double Comparison::run_once(const Grouping& grouping) {
  if (work_ == Work::backward) {
    find_order(grouping);
    forward_once(grouping);
  }
  const auto start = std::chrono::steady_clock::now();
  work_once(grouping);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void Comparison::warm_up(const std::vector<Grouping>& settings) {
  for (const Grouping& grouping : settings) static_cast<void>(run_once(grouping));
}

std::vector<Row> Comparison::errors(const std::vector<Grouping>& settings, std::int64_t max_rows) {
  Progress progress;
  std::vector<Row> rows;
  const Operation operation = work_ == Work::grouping  ? Operation::grouping
                              : work_ == Work::forward ? Operation::forward
                                                       : Operation::backward;
  for (const Grouping& grouping : settings) {
    rows.push_back({work_, grouping, explain(operation, inputs_.problem, grouping, execution_.device).kernel, {}, {}});
    require_kernel(operation, inputs_.problem, grouping, execution_);
  }
  std::vector<std::byte> o_exact;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string label = "error of setting " + std::to_string(i + 1) + " of " + std::to_string(rows.size());
    execution_.progress = progress.step(label);
    find_order(rows[i].grouping);
    forward_once(rows[i].grouping);
    if (i == 0) {
      o_exact = o_;
      continue;
    }
    ForwardTensors tensors = inputs_.tensors();
    tensors.order = order_.data();
    tensors.o = o_.data();
    rows[i].errors = measure(inputs_.problem, rows[i].grouping, tensors, o_exact.data(), max_rows, execution_);
  }
  execution_.progress = nullptr;
  return rows;
}

void Comparison::time(std::vector<Row>& rows, int repeats) {
  Progress progress;
  const auto total = static_cast<std::int64_t>(rows.size()) * repeats;
  std::int64_t done = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (Row& row : rows) {
      row.milliseconds.push_back(run_once(row.grouping));
      progress.show("timing", ++done, total);
    }
  }
  for (Row& row : rows) std::sort(row.milliseconds.begin(), row.milliseconds.end());
}

std::vector<double> Comparison::probabilities_of(const Grouping& grouping, std::int64_t batch, std::int64_t head,
                                                 std::int64_t size, std::int64_t& rows, std::int64_t& columns) {
  find_order(grouping);
  ForwardTensors tensors = inputs_.tensors();
  tensors.order = order_.data();
  return probabilities(inputs_.problem, grouping, tensors, batch, head, size, rows, columns);
}

Json row_json(const Problem& problem, const Row& row, double exact_ms) {
  Json json = {{"impl", "distr"}, {"kernel", row.kernel}, {"op", name_of(row.work)}};
  json.update(sizes_json(problem));
  json.update(grouping_json(problem, row.grouping));
  json["ms"] = row.median();
  json["ms_min"] = row.milliseconds.front();
  json["ms_max"] = row.milliseconds.back();
  json["runs"] = row.milliseconds.size();
  json["ratio_to_exact"] = exact_ms / row.median();
  json["rel_error_out"] = row.errors.output_frobenius;
  json["row_cosine_min"] = row.errors.row_cosine_min;
  json["total_variation"] = row.errors.total_variation;
  json["score_error_elementwise"] = row.errors.score_elementwise;
  json["score_error_signed"] = row.errors.score_signed;
  json["rows_measured"] = row.errors.rows;
  return json;
}

}  // namespace distr::cli
