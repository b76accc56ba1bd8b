// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "common/gradient_strides.h"
#include "common/near.h"
#include "common/sequence.h"

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

bool has_queries(const Problem& problem) {
  return problem.batch > 0 && problem.seq_q > 0 && (!problem.packed.has_value() || problem.packed->total_q > 0);
}
bool has_keys(const Problem& problem) {
  return problem.batch > 0 && problem.seq_k > 0 && (!problem.packed.has_value() || problem.packed->total_k > 0);
}

void require_distinct(const char* name, const Strides& strides, const Problem& problem, std::int64_t heads,
                      std::int64_t rows, std::int64_t total, std::int64_t columns) {
  const bool packed = problem.packed.has_value();
  require_distinct(name, packed ? Strides{0, strides.head, strides.row} : strides,
                   packed ? std::min<std::int64_t>(problem.batch, 1) : problem.batch, heads, packed ? total : rows,
                   columns);
}

void require_length(const std::string& name, std::int64_t found, std::int64_t low, std::int64_t high) {
  if (found < low || found > high) {
    throw Error(Status::invalid_argument, name + " is " + std::to_string(found) + "; allowed: " + std::to_string(low) +
                                              (low == high ? "" : " to " + std::to_string(high)));
  }
}

// Starts of sequences go from 0 to the total, and no sequence is longer than `longest`.
void require_starts(const std::string& name, const std::int32_t* starts, std::int64_t sequences, std::int64_t total,
                    std::int64_t longest) {
  const auto start = [&](std::int64_t b) { return name + "[" + std::to_string(b) + "]"; };
  require_length(start(0), starts[0], 0, 0);
  for (std::int64_t b = 1; b <= sequences; ++b) {
    require_length(start(b), starts[b], b == sequences ? total : starts[b - 1], total);
    require_length(start(b) + " - " + start(b - 1), starts[b] - starts[b - 1], 0, longest);
  }
}

// Lengths that are data. On CUDA nothing reads them here.
void check_lengths(const Problem& problem, Device device, const Lengths& lengths) {
  const bool packed = problem.packed.has_value();
  require(lengths.keys, "the lengths of the keys", problem.key_lengths);
  require(lengths.starts_q, "the starts of the sequences of Q", packed);
  require(lengths.starts_k, "the starts of the sequences of K", packed);
  for (std::int64_t b = 0; device == Device::cpu && problem.key_lengths && b < problem.batch; ++b) {
    require_length("the length of the keys of entry " + std::to_string(b), lengths.keys[b], 0, problem.seq_k);
  }
  if (device == Device::cpu && packed) {
    require_starts("starts_q", lengths.starts_q, problem.batch, problem.packed->total_q, problem.seq_q);
    require_starts("starts_k", lengths.starts_k, problem.batch, problem.packed->total_k, problem.seq_k);
  }
}

// What forward and backward have in common.
template <class Tensors>
void check_inputs(const Problem& problem, const Grouping& grouping, Device device, const Tensors& tensors) {
  check_lengths(problem, device, tensors.lengths);
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
  const auto [total_q, total_k] = problem.packed.value_or(PackedRows{});
  require_distinct("O", problem.o, problem, problem.heads_q, problem.seq_q, total_q, problem.head_dim_v);
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
  const auto [total_q, total_k] = problem.packed.value_or(PackedRows{});
  const common::GradientStrides strides = common::gradient_strides(problem);
  require_distinct("dQ", strides.q, problem, problem.heads_q, problem.seq_q, total_q, problem.head_dim);
  require_distinct("dK", strides.k, problem, problem.heads_kv, problem.seq_k, total_k, problem.head_dim);
  require_distinct("dV", strides.v, problem, problem.heads_kv, problem.seq_k, total_k, problem.head_dim_v);
  if (tensors.d_mask != nullptr && problem.mask.kind != MaskKind::additive) {
    throw Error(Status::invalid_argument,
                "the mask's gradient is wanted, but the mask is not additive; allowed: null, or an additive mask");
  }
}

void check_scores_inputs(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors) {
  if (common::has_lengths(problem)) {
    throw Error(Status::invalid_argument, "lengths are data; allowed: neither key_lengths nor packed sequences");
  }
  check_inputs(problem, grouping, Device::cpu, tensors);
}

}  // namespace distr
