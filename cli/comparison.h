// SPDX-License-Identifier: Apache-2.0
// Times and errors of settings on one problem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distr/measure.h"
#include "inputs.h"
#include "progress.h"
#include "report.h"

namespace distr::cli {

// What a timed run does. The time is that of all of it, but `backward` prepares order and forward beforehand.
enum class Work : std::uint8_t { grouping, forward, backward, forward_backward };

struct Row {
  Work work = Work::forward;
  Grouping grouping;
  std::string kernel;
  Errors errors;                     // of exact attention: none
  std::vector<double> milliseconds;  // ascending

  [[nodiscard]] double median() const;
};

class Comparison {
 public:
  // Refers to `inputs`.
  Comparison(const Inputs& inputs, Work work, Device device, int threads);

  // Runs each setting once, untimed.
  void warm_up(const std::vector<Grouping>& settings);

  // The rows of settings, of which the first is exact attention, with their errors; see measure() for max_rows.
  // Throws Error.
  [[nodiscard]] std::vector<Row> errors(const std::vector<Grouping>& settings, std::int64_t max_rows = 1 << 14);

  // Times all rows in turn, `repeats` times, so that a drift of the machine's speed meets all alike.
  void time(std::vector<Row>& rows, int repeats);

  // P of one head, as distr::probabilities returns it.
  [[nodiscard]] std::vector<double> probabilities_of(const Grouping& grouping, std::int64_t batch, std::int64_t head,
                                                     std::int64_t size, std::int64_t& rows, std::int64_t& columns);

 private:
  void find_order(const Grouping& grouping);
  double run_once(const Grouping& grouping);  // milliseconds

  void forward_once(const Grouping& grouping);
  void backward_once(const Grouping& grouping);
  void work_once(const Grouping& grouping);

  const Inputs& inputs_;
  Work work_;
  Execution execution_;
  std::vector<std::int32_t> order_;  // of the last setting that ran
  std::vector<std::byte> o_, lse_;   // likewise
  std::vector<std::byte> d_q_, d_k_, d_v_;
};

// A row of a result file.
[[nodiscard]] Json row_json(const Problem& problem, const Row& row, double exact_ms);

}  // namespace distr::cli
