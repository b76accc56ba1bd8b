// SPDX-License-Identifier: Apache-2.0
// What is timed: shapes and settings; and their tensors in device memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/stopwatch.h"
#include "kernel.h"

namespace distr::test {

struct Setting {
  Strategy strategy;
  std::int64_t group_size;
  std::int64_t block = Grouping{}.block;
};

inline constexpr std::int64_t kWholeSequence = std::int64_t{1} << 22;
inline constexpr Setting kSettings[] = {{Strategy::exact, 1},
                                        {Strategy::lsh, 2},
                                        {Strategy::lsh, 4},
                                        {Strategy::energy, 2},
                                        {Strategy::energy, 4},
                                        {Strategy::lsh, 2, kWholeSequence},
                                        {Strategy::lsh, 4, kWholeSequence},
                                        {Strategy::energy, 2, kWholeSequence},
                                        {Strategy::energy, 4, kWholeSequence}};

[[nodiscard]] const char* name_of(Strategy strategy);
[[nodiscard]] Grouping grouping_of(const Setting& setting);

// bf16, contiguous, as many KV heads as heads; "causal" is top-left.
[[nodiscard]] Problem problem_of(std::int64_t batch, std::int64_t heads, std::int64_t d, std::int64_t n, bool causal);
// "B1 H10 d128 N16384 causal"
[[nodiscard]] std::string label(const Problem& problem);

// B = 1, H = 10 and B = 4, H = 16; d = 32, 64, 128; N = 1024 to 32768; causal and not. `quick`: some of the former.
[[nodiscard]] std::vector<Problem> attention_shapes(bool quick);
// B * H = 1, 10, 32 and N = 2048 to 40960 (the paper's Section 4.7).
[[nodiscard]] std::vector<Problem> grouping_shapes(bool quick);

// Operations of exact attention: two for each multiply-add of its products, over the pairs that see each other.
[[nodiscard]] double forward_flops(const Problem& problem);
[[nodiscard]] double backward_flops(const Problem& problem);

// Several sets of random inputs, and outputs, of one problem: so many that the L2 cache does not hold them.
class Sets {
 public:
  Sets(const Problem& problem, void* stream);
  // Set n, counted round.
  [[nodiscard]] GroupingTensors grouping(int n) const;
  [[nodiscard]] ForwardTensors forward(int n) const;
  [[nodiscard]] BackwardTensors backward(int n) const;
  [[nodiscard]] int count() const { return static_cast<int>(sets_.size()); }

 private:
  struct Set {
    Memory q, k, v, o, lse, order, d_o, d_q, d_k, d_v;
  };
  [[nodiscard]] const Set& at(int n) const { return sets_[static_cast<std::size_t>(n) % sets_.size()]; }
  std::vector<Set> sets_;
};

}  // namespace distr::test
