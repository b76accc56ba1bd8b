// SPDX-License-Identifier: Apache-2.0
// Lengths that are data (Problem::key_lengths, Problem::packed): every batch entry is a problem of its own, with a
// batch of one, its own lengths, and tensors that begin where it does. What computes one problem then computes these.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "common/gradient_strides.h"
#include "common/mask.h"
#include "distr/attention.h"

namespace distr::common {

[[nodiscard]] inline std::string reason_against_lengths(const Problem& problem) {
  return problem.key_lengths          ? "has no key lengths that are data; key_lengths is for other kernels"
         : problem.packed.has_value() ? "has no packed sequences; they are for other kernels"
                                      : "";
}

// Where LSE of row i of a head lies.
[[nodiscard]] inline std::int64_t row_index(const Problem& problem, std::int64_t b, std::int64_t h,
                                            std::int64_t i) noexcept {
  return problem.packed.has_value() ? h * problem.packed->total_q + i : (b * problem.heads_q + h) * problem.seq_q + i;
}

// Rows of O(Nq) vectors, of all heads.
[[nodiscard]] inline std::int64_t count_rows(const Problem& problem) noexcept {
  return problem.heads_q * (problem.packed.has_value() ? problem.packed->total_q : problem.batch * problem.seq_q);
}

// The largest problem that a batch entry may be: the problem itself where no lengths are data.
[[nodiscard]] inline Problem longest_sequence(Problem problem) noexcept {
  problem.batch = has_lengths(problem) ? std::min<std::int64_t>(problem.batch, 1) : problem.batch;
  return problem;
}

// No packed sequence is longer than all of them together, however long the caller says that they may be.
[[nodiscard]] inline Problem without_longer_sequences(Problem problem) noexcept {
  if (problem.packed.has_value()) {
    problem.seq_q = std::min(problem.seq_q, problem.packed->total_q);
    problem.seq_k = std::min(problem.seq_k, problem.packed->total_k);
  }
  return problem;
}

// The rows and the keys of one batch entry, in the tensors of all.
struct Sequence {
  std::int64_t first_row, rows;
  std::int64_t first_key, keys;

  Sequence(const Problem& problem, const Lengths& lengths, std::int64_t b)
      : first_row(problem.packed.has_value() ? lengths.starts_q[b] : 0),
        rows(problem.packed.has_value() ? lengths.starts_q[b + 1] - first_row : problem.seq_q),
        first_key(problem.packed.has_value() ? lengths.starts_k[b] : 0),
        keys(problem.key_lengths          ? lengths.keys[b]
             : problem.packed.has_value() ? lengths.starts_k[b + 1] - first_key
                                          : problem.seq_k) {}
};

// `pointer`, where batch entry b begins.
template <class Pointer>
void advance(Pointer& pointer, std::size_t element_bytes, std::int64_t elements) {
  using Byte = std::conditional_t<std::is_same_v<Pointer, const void*>, const std::byte, std::byte>;
  pointer = static_cast<Byte*>(pointer) + static_cast<std::ptrdiff_t>(element_bytes) * elements;
}

// Calls function(problem, tensors, b) for batch entry b: with what the call has, or where lengths are data, with the
// entry's own problem and tensors and b = 0.
template <class Tensors, class Function>
void with_sequence(const Problem& problem, const Tensors& tensors, std::int64_t b, const Function& function) {
  if (!has_lengths(problem)) {
    function(problem, tensors, b);
    return;
  }
  const Sequence sequence(problem, tensors.lengths, b);
  const bool packed = problem.packed.has_value();
  const auto at = [&](const Strides& strides, std::int64_t first) {
    return packed ? first * strides.row : b * strides.batch;
  };
  const std::size_t bytes = size_of(problem.dtype);
  Problem own = problem;
  own.batch = 1;
  own.seq_q = sequence.rows;
  own.seq_k = sequence.keys;
  Tensors from = tensors;
  advance(from.q, bytes, at(problem.q, sequence.first_row));
  advance(from.k, bytes, at(problem.k, sequence.first_key));
  advance(from.v, bytes, at(problem.v, sequence.first_key));
  advance(from.o, bytes, at(problem.o, sequence.first_row));
  const std::int64_t vectors = packed ? sequence.first_row : row_index(problem, b, 0, 0);
  constexpr bool kIsBackward = std::is_same_v<Tensors, BackwardTensors>;
  if (kIsBackward || from.lse != nullptr) {  // a forward may be asked for none
    advance(from.lse, size_of(problem.lse_dtype()), vectors);
  }
  if constexpr (kIsBackward) {
    advance(from.d_o, bytes, at(problem.o, sequence.first_row));
    if (from.d_lse != nullptr) {
      advance(from.d_lse, size_of(problem.lse_dtype()), vectors);
    }
    const GradientStrides strides = gradient_strides(problem);
    advance(from.d_q, bytes, at(strides.q, sequence.first_row));
    advance(from.d_k, bytes, at(strides.k, sequence.first_key));
    advance(from.d_v, bytes, at(strides.v, sequence.first_key));
  }
  function(own, from, std::int64_t{0});
}

}  // namespace distr::common
