// SPDX-License-Identifier: Apache-2.0
// Measures times and errors of settings on one problem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "computation.h"
#include "distr/measure.h"
#include "inputs.h"
#include "progress.h"
#include "report.h"
#include "text.h"

namespace distr::cli {

// What a timed run does. The time covers all of it, except that `backward` computes the order and the forward before.
enum class Work : std::uint8_t { grouping, forward, backward, forward_backward };

struct Row {
  Work work = Work::forward;
  Grouping grouping;
  std::string kernel;
  Errors errors;
  std::vector<double> milliseconds;           // ascending
  std::vector<double> milliseconds_grouping;  // the grouping's part of them; ascending
  std::optional<double> kept_share;           // of far halves of tiles; empty: nothing is skipped

  [[nodiscard]] double median() const { return median_of(milliseconds); }
  [[nodiscard]] double median_grouping() const { return median_of(milliseconds_grouping); }
  // The median of ascending values.
  [[nodiscard]] static double median_of(const std::vector<double>& values);
};

// What errors are measured against.
enum class Truth : std::uint8_t {
  same_device,  // exact attention on the settings' device, whose own row has no errors
  cpu,          // exact attention on the CPU
};

class Comparison {
 public:
  // Keeps a reference to `inputs`.
  Comparison(const Inputs& inputs, Work work, Device device, int threads);

  // Runs each setting once, untimed.
  void warm_up(const std::vector<Grouping>& settings);

  // One row for each setting, with its errors. The first setting is exact attention; measure() explains max_rows.
  // Throws Error.
  [[nodiscard]] std::vector<Row> errors(const std::vector<Grouping>& settings, Truth truth,
                                        std::int64_t max_rows = 1 << 14);

  // Times all rows in turn, `repeats` times, so that a drift of the machine's speed affects all of them alike. Before a
  // run, a GPU's caches are emptied of the tensors.
  void time(std::vector<Row>& rows, int repeats);

  // P of one head, as distr::probabilities returns it.
  [[nodiscard]] std::vector<double> probabilities_of(const Grouping& grouping, std::int64_t batch, std::int64_t head,
                                                     std::int64_t size, std::int64_t& rows, std::int64_t& columns);

  [[nodiscard]] Computation& computation() { return computation_; }

 private:
  struct Lap {
    double all, grouping;  // milliseconds
  };
  void find_order(const Plan& plan);
  Lap run_once(const Grouping& grouping);
  [[nodiscard]] std::vector<std::byte> exact_output(const Grouping& exact, Truth truth);

  const Inputs& inputs_;
  Work work_;
  Computation computation_;  // holds order and outputs of the last setting that ran
};

// Columns of what is near, and of what is kept, where some row has such keys.
[[nodiscard]] bool has_near_keys(const std::vector<Row>& rows);
void add_near_columns(Table& table);
[[nodiscard]] std::vector<std::string> near_cells(const Row& row);

// A row as an object of a result file.
[[nodiscard]] Json row_json(const Problem& problem, const Row& row, double exact_ms);

}  // namespace distr::cli
