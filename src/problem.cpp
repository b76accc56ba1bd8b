// SPDX-License-Identifier: Apache-2.0
// Every rule about problems and groupings, once. Each message names the value and what is allowed.
#include "distr/problem.h"

#include <cmath>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>

#include "common/element.h"
#include "common/mask.h"
#include "common/near.h"
#include "decisions.h"
#include "distr/error.h"
#include "distr/grouping.h"

namespace distr {
inline namespace v0 {
namespace {

[[noreturn]] void invalid(const std::string& message) { throw Error(Status::invalid_argument, message); }

void require_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    const bool open = high == std::numeric_limits<std::int64_t>::max();
    invalid(std::string(name) + " is " + std::to_string(value) + "; allowed: " + std::to_string(low) +
            (open ? " and above" : " to " + std::to_string(high)));
  }
}

std::string text(const Mask& mask) {
  std::string result = "[";
  for (int axis = 0; axis < mask.rank; ++axis) {
    result += (axis == 0 ? "" : ", ") + std::to_string(mask.shape[static_cast<std::size_t>(axis)]);
  }
  return result + "]";
}

void validate_mask(const Problem& problem) {
  const Mask& mask = problem.mask;
  require_range("the mask's rank", mask.rank, 0, 4);
  if (mask.kind == MaskKind::none) {
    return;
  }
  if (problem.causal != Causal::none) {
    invalid("a mask and causal were both given; allowed: one of them");
  }
  const std::array<std::int64_t, 4> target{problem.batch, problem.heads_q, problem.seq_q, problem.seq_k};
  for (int axis = 0; axis < mask.rank; ++axis) {
    const std::int64_t length = mask.shape[static_cast<std::size_t>(axis)];
    const std::int64_t wanted = target[static_cast<std::size_t>(4 - mask.rank + axis)];
    if (length != 1 && length != wanted) {
      invalid("the mask's shape " + text(mask) + " does not broadcast; allowed: axes aligned at the right of " +
              "[batch, heads_q, seq_q, seq_k] = [" + std::to_string(problem.batch) + ", " +
              std::to_string(problem.heads_q) + ", " + std::to_string(problem.seq_q) + ", " +
              std::to_string(problem.seq_k) + "], each of that length or 1");
    }
  }
}

void validate_window(const Problem& problem) {
  require_range("window_left", problem.window_left.value_or(0), 0, kMaxDistance);
  require_range("window_right", problem.window_right.value_or(0), 0, kMaxDistance);
  require_range("window_offset", problem.window_offset.value_or(0), -kMaxDistance, kMaxDistance);
  if (problem.window_offset.has_value() && problem.causal != Causal::none) {
    invalid("window_offset is " + std::to_string(*problem.window_offset) +
            " in a causal call, whose corner says where queries stand; allowed: none");
  }
}

void validate_softcap(const Problem& problem, const Grouping& grouping) {
  const auto found = [&] {
    std::ostringstream text;
    text << "softcap is " << problem.softcap;
    return text.str();
  };
  constexpr double kLeast = std::numeric_limits<float>::min();
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (problem.softcap != 0 && !(problem.softcap >= kLeast && problem.softcap <= kLargest)) {
    invalid(found() + "; allowed: 0 (scores are not capped), or a positive number that fp32 holds");
  }
  if (problem.softcap != 0 && grouping.skip > 0) {
    invalid(found() + " with skip, which is " + std::to_string(grouping.skip) + "; allowed: one of them");
  }
}

void validate_lengths(const Problem& problem) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (!common::has_lengths(problem)) {
    return;
  }
  const std::string found = problem.packed.has_value() ? "packed sequences were given" : "key_lengths was given";
  if (problem.packed.has_value()) {
    require_range("total_q", problem.packed->total_q, 0, kMost);
    require_range("total_k", problem.packed->total_k, 0, kMost);
  }
  if (problem.packed.has_value() && problem.key_lengths) {
    invalid("packed sequences and key_lengths were both given; allowed: one of them");
  }
  if (problem.mask.kind != MaskKind::none) {
    invalid(found + " with a mask; allowed: a causal corner and a window");
  }
  if (problem.window_offset.has_value()) {
    invalid(found + " with window_offset, which is " + std::to_string(*problem.window_offset) +
            "; allowed: none, as windows stand at the bottom right");
  }
}

// Lengths that are data are exact attention's; `automatic` comes to that.
void require_exact(const Problem& problem, const Grouping& grouping) {
  if (!common::has_lengths(problem)) {
    return;
  }
  const std::string found =
      problem.packed.has_value() ? "packed sequences were given with " : "key_lengths was given with ";
  if (!is_exact(grouping) && grouping.strategy != Strategy::automatic) {
    invalid(found + "strategy " + traits(grouping.strategy).name + "; allowed: exact, auto, or a group size of 1");
  }
  if (grouping.skip > 0) {
    invalid(found + "skip, which is " + std::to_string(grouping.skip) + "; allowed: 0");
  }
}

// The product of non-negative sizes must be countable in int64.
void require_countable(const char* name, std::initializer_list<std::int64_t> sizes) {
  std::int64_t product = 8;  // bytes of the largest element
  for (const std::int64_t size : sizes) {
    if (size == 0) {
      return;
    }
    if (product > std::numeric_limits<std::int64_t>::max() / size) {
      invalid(std::string("the size of ") + name + " overflows; allowed: fewer than 2^63 bytes");
    }
    product *= size;
  }
}

// Block 0 of `previous` is exact. Short prompts are no longer than that; a longer call that is but one block asks for
// an approximation and would get none.
void require_second_block(const Problem& problem, const Grouping& grouping) {
  constexpr std::int64_t kLongest = Grouping{}.block;
  const bool is_computed = traits(grouping.strategy).order == OrderSource::computed;
  if (problem.causal == Causal::none || !is_computed || grouping.strategy == Strategy::automatic ||
      grouping.group_size == 1 || grouping.order_from == OrderFrom::own || grouping.part.has_value()) {
    return;
  }
  if (problem.seq_q > kLongest && grouping.block >= problem.seq_q) {
    invalid("block is " + std::to_string(grouping.block) + ", one for all " + std::to_string(problem.seq_q) +
            " rows of a causal call, whose orders come from the block before: it would be exact; allowed: a block of " +
            "at most " + std::to_string(problem.seq_q - 1) + " rows, or order_from own");
  }
}

void validate_near_keys(const Problem& problem, const Grouping& grouping) {
  require_range("window", grouping.window.value_or(0), 0, kMaxDistance);
  require_range("sinks", grouping.sinks, 0, kMaxDistance);
  require_range("key_offset", grouping.key_offset.value_or(0), -kMaxDistance, kMaxDistance);
  if (grouping.key_offset.has_value() && problem.causal != Causal::none) {
    invalid("key_offset is " + std::to_string(*grouping.key_offset) +
            " in a causal call, whose corner says where queries stand; allowed: none");
  }
  if (!(grouping.skip >= 0 && grouping.skip < 1)) {
    invalid("skip is " + std::to_string(grouping.skip) + "; allowed: 0 (nothing is skipped), or a probability below 1");
  }
  if (grouping.skip > 0 && !common::has_near_keys(grouping)) {
    invalid("skip is set and neither window nor sinks, against whose keys it is measured; allowed: one of them, too");
  }
  if (grouping.finish && grouping.skip == 0) {
    invalid("finish is set without skip, which it is about; allowed: with a skip above 0");
  }
  const StrategyTraits& strategy = traits(grouping.strategy);
  const bool drops = strategy.order != OrderSource::none && strategy.members == Members::one && grouping.group_size > 1;
  if (grouping.finish && !drops) {
    invalid(std::string("finish is set with strategy ") + strategy.name + " and group size " +
            std::to_string(grouping.group_size) +
            ", which drop no columns; allowed: strategies that drop some (energy, given) and a group size above 1");
  }
}

void validate_part(const Problem& problem, const Grouping& grouping) {
  if (!grouping.part.has_value()) {
    return;
  }
  const auto [first_row, first_key] = *grouping.part;
  const auto require_position = [](const char* name, std::int64_t position, std::int64_t step, const char* why) {
    require_range(name, position, 0, kMaxDistance);
    if (position % step != 0) {
      invalid(std::string(name) + " is " + std::to_string(position) + "; allowed: a multiple of " +
              std::to_string(step) + ", " + why);
    }
  };
  require_position("first_row", first_row, is_exact(grouping) ? 1 : grouping.block, "the rows of a block");
  require_position("first_key", first_key, common::has_near_keys(grouping) ? common::kNearTile : 1,
                   "the keys that are near or far together");
  if (grouping.strategy == Strategy::automatic) {
    invalid("the strategy of a part of a call is auto, which is for the whole to decide; allowed: another");
  }
  if (grouping.skip > 0 || grouping.key_offset.has_value()) {
    invalid("a part of a call has a skip or a key_offset; allowed: neither");
  }
  if (problem.causal != Causal::none && first_row - first_key != common::causal_offset(problem)) {
    invalid("first_row is " + std::to_string(first_row) + " and first_key " + std::to_string(first_key) +
            " in a causal call; allowed: positions as far from each other as its corner says, " +
            std::to_string(common::causal_offset(problem)));
  }
}

}  // namespace

std::size_t size_of(DType dtype) noexcept {
  return common::with_element(dtype, []<class T>(std::type_identity<T>) { return sizeof(T); });
}

void convert(const void* source, DType source_type, void* target, DType target_type, std::int64_t count) noexcept {
  common::with_element(source_type, [=]<class From>(std::type_identity<From>) {
    common::with_element(target_type, [=]<class To>(std::type_identity<To>) {
      const auto* from = static_cast<const From*>(source);
      auto* to = static_cast<To*>(target);
      for (std::int64_t i = 0; i < count; ++i) {
        to[i] = common::from_double<To>(common::to_double(from[i]));
      }
    });
  });
}

double Problem::softmax_scale() const noexcept {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

Problem contiguous(Problem problem) noexcept {
  const bool packed = problem.packed.has_value();
  const auto strides = [packed](std::int64_t heads, std::int64_t rows, std::int64_t dim) {
    return packed ? Strides{0, dim, heads * dim} : Strides{heads * rows * dim, rows * dim, dim};
  };
  problem.q = strides(problem.heads_q, problem.seq_q, problem.head_dim);
  problem.k = strides(problem.heads_kv, problem.seq_k, problem.head_dim);
  problem.v = strides(problem.heads_kv, problem.seq_k, problem.head_dim_v);
  problem.o = strides(problem.heads_q, problem.seq_q, problem.head_dim_v);
  return problem;
}

void validate(const Problem& problem) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  require_range("batch", problem.batch, 0, kAny);
  require_range("heads_q", problem.heads_q, 1, kAny);
  require_range("heads_kv", problem.heads_kv, 1, kAny);
  require_range("seq_q", problem.seq_q, 0, kAny);
  require_range("seq_k", problem.seq_k, 0, kAny);
  require_range("head_dim", problem.head_dim, 1, kMaxHeadDim);
  require_range("head_dim_v", problem.head_dim_v, 1, kMaxHeadDim);
  if (problem.heads_q % problem.heads_kv != 0) {
    invalid("heads_q is " + std::to_string(problem.heads_q) + "; allowed: a multiple of heads_kv, which is " +
            std::to_string(problem.heads_kv));
  }
  require_countable("Q", {problem.batch, problem.heads_q, problem.seq_q, problem.head_dim});
  require_countable("K", {problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim});
  require_countable("V", {problem.batch, problem.heads_kv, problem.seq_k, problem.head_dim_v});
  require_countable("O", {problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v});
  if (!(std::abs(problem.softmax_scale()) <= std::numeric_limits<float>::max())) {
    invalid("scale is " + std::to_string(problem.softmax_scale()) + "; allowed: a finite number that fp32 holds");
  }
  validate_mask(problem);
  validate_window(problem);
  validate_softcap(problem, {});
  validate_lengths(problem);
}

void validate(const Problem& problem, const Grouping& grouping) {
  count(decision_counts.validated);
  validate(problem);
  require_range("group_size", grouping.group_size, 1, problem.head_dim);
  require_range("block", grouping.block, 1, std::numeric_limits<std::int64_t>::max());
  require_exact(problem, grouping);
  validate_softcap(problem, grouping);
  require_second_block(problem, grouping);
  validate_near_keys(problem, grouping);
  validate_part(problem, grouping);
}

std::int64_t num_groups(const Problem& problem, const Grouping& grouping) noexcept {
  return common::ceil_div(problem.head_dim, grouping.group_size);
}

std::array<std::int64_t, 4> order_shape(const Problem& problem, const Grouping& grouping) noexcept {
  return {problem.batch, problem.heads_q, common::ceil_div(problem.seq_q, grouping.block), problem.head_dim};
}

bool needs_key_means(const Grouping& grouping) noexcept { return common::has_key_means(grouping); }

std::array<std::int64_t, 4> key_means_shape(const Problem& problem, const Grouping& grouping) noexcept {
  return {problem.batch, problem.heads_kv, common::num_key_means(problem, grouping), problem.head_dim};
}

std::array<std::int64_t, 4> halves_shape(const Problem& problem) noexcept {
  return {problem.batch, problem.heads_q, common::num_skip_rows(problem), 2};
}

}  // namespace v0
}  // namespace distr
