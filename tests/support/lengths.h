// SPDX-License-Identifier: Apache-2.0
// The shared problems as calls whose lengths are data: entries of the batch lie between others of other lengths, all of
// whose values are NaN, and which nothing may reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "support/cases.h"

namespace distr::test {

enum class LengthsAs { keys, packed };

[[nodiscard]] const char* name_of(LengthsAs kind);

// Whether the case is the same with lengths that are data.
[[nodiscard]] bool can_have_lengths(const Case& test_case, LengthsAs kind);
// The dense problem's, with the neighbours.
[[nodiscard]] Problem with_lengths(const Problem& dense, LengthsAs kind);

// A call with lengths, made of a dense one.
template <class Tensors>
class WithLengths {
 public:
  WithLengths(LengthsAs kind, const Problem& dense, const Tensors& tensors);
  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] const Tensors& tensors() const { return tensors_; }
  // Copies what was written to the dense call's outputs.
  void take_results() const;

 private:
  struct Copy {
    std::byte* dense;
    Strides from, to;
    std::int64_t heads, rows, columns;
    bool of_keys;
    std::size_t element;
    std::vector<std::byte> own;
  };
  void visit(const Copy& copy, const std::function<void(std::int64_t dense, std::int64_t own)>& row) const;
  // Of the new tensor: NaN, and where it is an input the dense one's values.
  void* place(const void* dense, const Copy& copy, bool is_input);

  Problem dense_, problem_;
  Tensors tensors_{};
  std::vector<std::int32_t> keys_, starts_q_, starts_k_;
  std::vector<Copy> outputs_;
  std::vector<std::vector<std::byte>> inputs_;
};

}  // namespace distr::test
