// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "common/near.h"

namespace distr {
namespace {

void require(const void* pointer, const char* name, bool needed = true) {
  if (needed && pointer == nullptr) {
    throw Error(Status::invalid_argument, std::string(name) + " is null; allowed: memory of the problem's sizes");
  }
}

// Two elements of a tensor that is written must not share memory: each axis has to step over all that shorter steps
// reach.
void require_distinct(const char* name, const Strides& strides, std::int64_t batch, std::int64_t heads,
                      std::int64_t rows, std::int64_t columns) {
  if (batch == 0 || rows == 0) {
    return;
  }
  std::array<std::pair<std::int64_t, std::int64_t>, 3> axes{
      // step, length
      {{std::abs(strides.batch), batch}, {std::abs(strides.head), heads}, {std::abs(strides.row), rows}}};
  std::sort(axes.begin(), axes.end());
  std::int64_t reach = columns;
  for (const auto& [step, length] : axes) {
    if (length <= 1) {
      continue;
    }
    if (step < reach) {
      throw Error(
          Status::invalid_argument,
          std::string("the strides of ") + name + " are " + std::to_string(strides.batch) + ", " +
              std::to_string(strides.head) + ", " + std::to_string(strides.row) +
              " and elements overlap; allowed: strides that keep all elements apart, as contiguous() sets them");
    }
    reach = step * (length - 1) + reach;
  }
}

// Every row that is read must be a permutation of the columns: anything else would read beside Q and K.
void require_permutations(const Problem& problem, const Grouping& grouping, const std::int32_t* order) {
  const std::int64_t d = problem.head_dim;
  const auto shape = order_shape(problem, grouping);
  std::array<std::int64_t, kMaxHeadDim> seen_in{};  // 1 + the row that had the column last
  for (std::int64_t row = 0; row < shape[0] * shape[1] * shape[2]; ++row) {
    if (common::is_exact_block(grouping, row % shape[2])) {
      continue;
    }
    for (std::int64_t position = 0; position < d; ++position) {
      const std::int64_t column = order[row * d + position];
      const bool valid = column >= 0 && column < d && seen_in[static_cast<std::size_t>(column)] != row + 1;
      if (!valid) {
        throw Error(Status::invalid_argument, "row " + std::to_string(row) +
                                                  " of the order is no permutation: it has " + std::to_string(column) +
                                                  " at position " + std::to_string(position) +
                                                  "; allowed: each of 0 to " + std::to_string(d - 1) + " once");
      }
      seen_in[static_cast<std::size_t>(column)] = row + 1;
    }
  }
}

bool has_queries(const Problem& problem) { return problem.batch > 0 && problem.seq_q > 0; }
bool has_keys(const Problem& problem) { return problem.batch > 0 && problem.seq_k > 0; }

// What forward and backward have in common.
template <class Tensors>
void check_inputs(const Problem& problem, const Grouping& grouping, Device device, const Tensors& tensors) {
  require(tensors.q, "Q", has_queries(problem));
  require(tensors.k, "K", has_keys(problem));
  require(tensors.mask, "the mask", problem.mask.kind != MaskKind::none && has_queries(problem) && has_keys(problem));
  if (!is_exact(grouping) && has_queries(problem)) {
    require(tensors.order, "the order");
    if (device == Device::cpu) {
      require_permutations(problem, grouping, tensors.order);
    }
    require(tensors.key_means, "the means of the keys", common::has_key_means(grouping));
  }
}

}  // namespace

void check(const Problem& problem, const Grouping& grouping, Device /*device*/, const GroupingTensors& tensors) {
  const StrategyTraits& strategy = traits(grouping.strategy);
  const bool has_means = common::has_key_means(grouping);
  const bool reads = has_queries(problem) && !is_exact(grouping);
  require(tensors.q, "Q", reads && strategy.order == OrderSource::computed);
  require(tensors.k, "K", reads && (strategy.reads_keys || has_means) && has_keys(problem));
  require(tensors.order, "the order", has_queries(problem) && (!reads || strategy.order == OrderSource::computed));
  require(tensors.key_means, "the means of the keys", has_queries(problem) && has_means);
}

void check(const Problem& problem, const Grouping& grouping, Device device, const ForwardTensors& tensors) {
  check_inputs(problem, grouping, device, tensors);
  require(tensors.v, "V", has_keys(problem));
  require(tensors.o, "O", has_queries(problem));
  require_distinct("O", problem.o, problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v);
  if (tensors.halves != nullptr && grouping.skip == 0) {
    throw Error(Status::invalid_argument,
                "counts of kept halves are wanted, but nothing is skipped; allowed: null, or a skip above 0");
  }
}

void check(const Problem& problem, const Grouping& grouping, Device device, const BackwardTensors& tensors) {
  check_inputs(problem, grouping, device, tensors);
  require(tensors.v, "V", has_keys(problem));
  require(tensors.o, "O", has_queries(problem));
  require(tensors.lse, "LSE", has_queries(problem));
  require(tensors.d_o, "dO", has_queries(problem));
  require(tensors.d_q, "dQ", has_queries(problem));
  require(tensors.d_k, "dK", has_keys(problem));
  require(tensors.d_v, "dV", has_keys(problem));
  require_distinct("dQ", problem.q, problem.batch, problem.heads_q, problem.seq_q, problem.head_dim);
  require_distinct("dK", problem.k, problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim);
  require_distinct("dV", problem.v, problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim_v);
  if (tensors.d_mask != nullptr && problem.mask.kind != MaskKind::additive) {
    throw Error(Status::invalid_argument,
                "the mask's gradient is wanted, but the mask is not additive; allowed: null, or an additive mask");
  }
}

void check_scores_inputs(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors) {
  check_inputs(problem, grouping, Device::cpu, tensors);
}

}  // namespace distr
