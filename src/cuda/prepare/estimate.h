// SPDX-License-Identifier: Apache-2.0
// q_hat of every block's grouping, as it is or spread over the d columns, and k_hat of one grouping for the whole
// sequence (method, 2: steps 4 and 5; 3: Q~); and what far scores keep of the columns that q_hat drops (method, 8). For
// d up to 128; preprocess_rows() makes Q~ of all other shapes, and dropped_scores() the constants of their rows.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/prepare/operand.h"
#include "cuda/problem.h"

namespace distr::cuda {

enum class Estimate : std::uint8_t { sum, mean, first };  // of a group's columns

// What estimations that are made together, one or two, have in common.
struct Groups {
  DType dtype;
  std::int64_t heads_q;
  int members;  // of a group
  int count;
};

// estimated[batch, heads_q, rows, packed_columns(columns)] of x[batch, heads, rows, columns of x], where query head
// h reads head h / (heads_q / heads); sums in fp32; zeros in the columns that are added. order: [batch, heads_q,
// ceil(rows / block), columns of x], for blocks that 64 divides or that hold all rows.
struct Estimation {
  Strides strides;  // of x, aligned
  Extent extent;    // of x
  Estimate kind;
  std::int64_t block;
  std::int64_t first_row;  // of a block; those before it are left as they are
  bool spread;             // over x's columns: each holds its group's estimate, those without a group 0; else one
                           // column for each group

  [[nodiscard]] std::int64_t columns(const Groups& groups) const { return spread ? extent.columns : groups.count; }
  [[nodiscard]] Extent result(const Groups& groups) const {
    return {extent.batch, groups.heads_q, extent.rows, columns(groups)};
  }
};

// dropped[batch, heads_q, rows] = sum over a row's dropped columns c of q_c kbar_c, without the scale, for the rows of
// the first estimation, which is of Q, in groups of one member. The sums are in fp32, and the same as dropped_scores()
// has. With `only_far` rows that see no far key get 0, as means that are no numbers must leave them alone.
struct DroppedScores {
  const float* key_means = nullptr;  // [batch, heads_kv, blocks or 1, columns]
  float* dropped = nullptr;          // null: none are wanted
  unsigned heads_kv = 1, means = 1;  // means: blocks or 1
  bool only_far = false;
  DeviceProblem problem{};  // with only_far
};

// One launch that makes them.
class Estimates {
 public:
  Estimates(const Groups& groups, std::span<const Estimation> estimations);

  struct Tensors {
    const void* x;
    float scale;  // of the estimates, before they are rounded
    void* x_hat;
  };
  // One Tensors for each estimation.
  void make(const std::int32_t* order, std::span<const Tensors> tensors, const DroppedScores& dropped,
            void* stream) const;

  // An Estimation as the kernel takes it.
  struct Job {
    const void* x;
    Strides strides;
    Estimate kind;
    unsigned head_rows, heads, columns;  // of x
    unsigned block, blocks, first_row;   // of Q's or K's rows
    unsigned estimates, pairs;           // columns of x_hat without and with those that are added
    bool spread;
    float scale;
    unsigned chunk_bits;            // of a row, 1 << chunk_bits at least
    unsigned run_rows, runs, grid;  // rows of a thread block; runs of a head, and of all
    std::uint32_t* to;
  };
  struct Arguments {
    Job jobs[2];
    const std::int32_t* order;
    unsigned heads_q, members, groups;
    DroppedScores dropped;
  };

 private:
  Arguments arguments_;
  void (*kernel_)(Arguments);
};

}  // namespace distr::cuda
