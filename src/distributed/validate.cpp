// SPDX-License-Identifier: Apache-2.0
#include "distributed/validate.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "distr/error.h"

namespace distr::distributed {
namespace {

// Copies take rows that lie behind each other, or further apart.
void require_rows(const char* name, const Strides& strides, std::int64_t rows, std::int64_t columns) {
  if (rows > 1 && strides.row < columns) {
    throw_invalid(std::string("the row stride of ") + name + " is " + std::to_string(strides.row) +
                  "; allowed where tensors are streamed: " + std::to_string(columns) + " and more");
  }
}

// Heads of O may lie between each other's rows, but must not share memory.
void require_distinct_output(const Problem& p) {
  std::array<std::pair<std::int64_t, std::int64_t>, 3> axes{
      {{std::abs(p.o.batch), p.batch}, {std::abs(p.o.head), p.heads_q}, {p.o.row, p.seq_q}}};  // step, length
  std::sort(axes.begin(), axes.end());
  std::int64_t reach = p.head_dim_v;
  for (const auto& [step, length] : axes) {
    if (length > 1 && step < reach) {
      throw_invalid("the strides of O are " + std::to_string(p.o.batch) + ", " + std::to_string(p.o.head) + ", " +
                    std::to_string(p.o.row) + " and elements overlap; allowed: strides that keep all elements apart");
    }
    reach += length > 1 ? step * (length - 1) : 0;
  }
}

}  // namespace

void throw_invalid(const std::string& message) { throw Error(Status::invalid_argument, message); }

void validate_streamed(const Problem& problem, const Grouping& grouping) {
  validate(problem, grouping);
  if (problem.mask.kind != MaskKind::none) {
    throw_invalid("there is a mask, which is not streamed; allowed: a causal corner, or none");
  }
  if (problem.window_left.has_value() || problem.window_right.has_value()) {
    throw_invalid("there is a sliding window, which is not streamed; allowed: neither window_left nor window_right");
  }
  if (problem.key_lengths || problem.packed.has_value()) {
    throw_invalid("lengths are data, which is not streamed; allowed: neither key_lengths nor packed sequences");
  }
  if (grouping.part.has_value()) {
    throw_invalid("the grouping is a part of a longer call, which is not streamed; allowed: none");
  }
  require_rows("Q", problem.q, problem.seq_q, problem.head_dim);
  require_rows("K", problem.k, problem.seq_k, problem.head_dim);
  require_rows("V", problem.v, problem.seq_k, problem.head_dim_v);
  require_rows("O", problem.o, problem.seq_q, problem.head_dim_v);
  if (problem.batch > 0 && problem.seq_q > 0) {
    require_distinct_output(problem);
  }
}

}  // namespace distr::distributed
