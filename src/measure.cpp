// SPDX-License-Identifier: Apache-2.0
// Evaluation: errors of O as computed, of S and P by the float64 equations.
#include "distr/measure.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"
#include "common/parallel.h"
#include "dispatch.h"
#include "reference/head_scores.h"

namespace distr {
namespace {

using reference::Matrix;

// Sums over the rows of one head.
struct Sums {
  double output_error = 0, output_exact = 0;  // squares
  double cosine_min = 1;
  double total_variation = 0;
  double score_error = 0, score_signed = 0, score_exact = 0;
  std::int64_t rows = 0;

  void add_cosine(double cosine) {
    cosine_min = std::isnan(cosine_min) || cosine >= cosine_min ? cosine_min : cosine;
  }  // NaN stays

  void add(const Sums& other) {
    output_error += other.output_error;
    output_exact += other.output_exact;
    add_cosine(other.cosine_min);
    total_variation += other.total_variation;
    score_error += other.score_error;
    score_signed += other.score_signed;
    score_exact += other.score_exact;
    rows += other.rows;
  }
};

// The approximate scores of row i, and of the rows that are skipped with it (method, 8).
class ApproximateRows {
 public:
  ApproximateRows(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                  const reference::Head& head)
      : problem_(problem), grouping_(grouping), scores_(problem, grouping, reference::score_tensors(tensors), head) {}

  // Rows must come in ascending order.
  const std::vector<double>& row(std::int64_t i) {
    if (grouping_.skip == 0) {
      rows_.resize(1);
      scores_.row(i, rows_[0]);
      return rows_[0];
    }
    const std::int64_t first = i / common::kSkipRows * common::kSkipRows;
    if (first != first_) {
      first_ = first;
      rows_.resize(static_cast<std::size_t>(std::min(common::kSkipRows, problem_.seq_q - first)));
      scores_.skipped_rows(first, rows_);
    }
    return rows_[static_cast<std::size_t>(i - first)];
  }

 private:
  const Problem& problem_;
  const Grouping& grouping_;
  reference::HeadScores scores_;
  std::int64_t first_ = -1;
  std::vector<std::vector<double>> rows_;
};

// What the mask adds to the scores of row i.
std::vector<double> bias_of(const Problem& problem, const common::MaskView& mask, const reference::RowPosition& at) {
  std::vector<double> result(static_cast<std::size_t>(problem.seq_k));
  for (std::size_t j = 0; j < result.size() && !mask.none(); ++j) {
    result[j] = mask(at.b, at.h, at.i, static_cast<std::int64_t>(j));
  }
  return result;
}

void add_output_errors(const Problem& problem, const void* o, const void* o_exact, std::int64_t b, std::int64_t h,
                       Sums& sums) {
  for (std::int64_t i = 0; i < problem.seq_q; ++i) {
    const Matrix x = reference::load_rows(o, problem.dtype, problem.o, b, h, i, 1, problem.head_dim_v);
    const Matrix y = reference::load_rows(o_exact, problem.dtype, problem.o, b, h, i, 1, problem.head_dim_v);
    const double xx = reference::dot(x.row(0), x.row(0), x.columns);
    const double yy = reference::dot(y.row(0), y.row(0), y.columns);
    const double xy = reference::dot(x.row(0), y.row(0), x.columns);
    for (std::int64_t c = 0; c < x.columns; ++c) {
      const double difference = x.row(0)[c] - y.row(0)[c];
      sums.output_error += difference * difference;
    }
    sums.output_exact += yy;
    if (yy > 0) {
      sums.add_cosine(xx == 0 ? 0 : xy / std::sqrt(xx * yy));
    }
  }
}

// `bias` is what the mask added to both kinds of scores.
void add_row_errors(const std::vector<double>& s_exact, const std::vector<double>& s, const std::vector<double>& bias,
                    Sums& sums) {
  std::vector<double> p_exact;
  std::vector<double> p;
  reference::softmax(s_exact, p_exact);
  reference::softmax(s, p);
  double variation = 0;
  for (std::size_t j = 0; j < s.size(); ++j) {
    variation += std::abs(p[j] - p_exact[j]) / 2;
    if (std::isfinite(s_exact[j]) && s[j] != -std::numeric_limits<double>::infinity()) {  // else hidden, or skipped
      sums.score_error += std::abs(s[j] - s_exact[j]);
      sums.score_signed += s[j] - s_exact[j];
      sums.score_exact += std::abs(s_exact[j] - bias[j]);
    }
  }
  sums.total_variation += variation;
  ++sums.rows;
}

double ratio(double error, double size) { return error == 0 ? 0 : error / size; }

}  // namespace

inline namespace v0 {

Errors measure(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors, const void* o_exact,
               std::int64_t max_rows, const Execution& execution) {
  validate(problem, grouping);
  const Grouping resolved = resolve(problem, grouping, Device::cpu).grouping;
  check_scores_inputs(problem, resolved, tensors);
  if (problem.batch * problem.seq_q > 0 && (tensors.o == nullptr || o_exact == nullptr)) {
    throw Error(Status::invalid_argument, "O or the exact O is null; allowed: memory of the problem's sizes");
  }
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t rows_per_head =
      std::min(problem.seq_q, std::max<std::int64_t>(1, max_rows / std::max<std::int64_t>(heads, 1)));
  std::vector<Sums> of_head(static_cast<std::size_t>(heads));
  Execution run = execution;
  run.threads = run.threads == 0 ? common::available_processors() : run.threads;
  common::parallel_for(run, heads, [&](std::int64_t head, int) {
    const std::int64_t b = head / problem.heads_q;
    const std::int64_t h = head % problem.heads_q;
    Sums& sums = of_head[static_cast<std::size_t>(head)];
    add_output_errors(problem, tensors.o, o_exact, b, h, sums);
    const reference::Head position = reference::head_of(problem, head);
    const common::MaskView mask(problem.mask, tensors.mask);
    reference::HeadScores exact_scores(problem, resolved, reference::score_tensors(tensors), position);
    ApproximateRows approximate(problem, resolved, tensors, position);
    std::vector<double> exact;
    for (std::int64_t n = 0; n < rows_per_head; ++n) {
      const std::int64_t i = n * problem.seq_q / rows_per_head;
      exact_scores.exact_row(i, exact);
      add_row_errors(exact, approximate.row(i), bias_of(problem, mask, {b, h, i}), sums);
    }
  });
  Sums sums;
  for (const Sums& head : of_head) {
    sums.add(head);
  }
  return {ratio(std::sqrt(sums.output_error), std::sqrt(sums.output_exact)),
          sums.cosine_min,
          ratio(sums.total_variation, static_cast<double>(sums.rows)),
          ratio(sums.score_error, sums.score_exact),
          ratio(std::abs(sums.score_signed), sums.score_exact),
          sums.rows};
}

std::vector<double> probabilities(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                                  std::int64_t batch, std::int64_t head, std::int64_t size, std::int64_t& rows,
                                  std::int64_t& columns) {
  validate(problem, grouping);
  const Grouping resolved = resolve(problem, grouping, Device::cpu).grouping;
  check_scores_inputs(problem, resolved, tensors);
  if (batch < 0 || batch >= problem.batch || head < 0 || head >= problem.heads_q || size < 1) {
    throw Error(Status::invalid_argument, "batch " + std::to_string(batch) + ", head " + std::to_string(head) +
                                              ", size " + std::to_string(size) + "; allowed: batch below " +
                                              std::to_string(problem.batch) + ", head below " +
                                              std::to_string(problem.heads_q) + ", size 1 and above");
  }
  rows = std::min(size, problem.seq_q);
  columns = std::min(size, problem.seq_k);
  Matrix sum(rows, columns);
  Matrix count(rows, columns);
  ApproximateRows scores(problem, resolved, tensors, reference::head_of(problem, batch * problem.heads_q + head));
  std::vector<double> p;
  for (std::int64_t i = 0; i < problem.seq_q; ++i) {
    reference::softmax(scores.row(i), p);
    for (std::int64_t j = 0; j < problem.seq_k; ++j) {
      sum.row(i * rows / problem.seq_q)[j * columns / problem.seq_k] += p[static_cast<std::size_t>(j)];
      count.row(i * rows / problem.seq_q)[j * columns / problem.seq_k] += 1;
    }
  }
  for (std::size_t index = 0; index < sum.values.size(); ++index) {
    sum.values[index] /= count.values[index];
  }
  return sum.values;
}

}  // namespace v0
}  // namespace distr
