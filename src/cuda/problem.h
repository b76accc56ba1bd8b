// SPDX-License-Identifier: Apache-2.0
// What kernels take by value: a Problem and its Grouping in plain numbers, for host and device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/block.h"
#include "common/mask.h"
#include "common/near.h"
#include "cuda/divisor.cuh"

namespace distr::cuda {

// Of shared memory, that a thread block may have on every GPU since sm_80.
inline constexpr int kMaxSharedBytes = 99 * 1024;
// On compute capability 8.0, 9.0 and 10.0, not on 8.6, 8.9 and 12.0.
inline constexpr int kMaxSharedBytesOfServers = 163 * 1024;

// A mask broadcast to [batch, heads_q, seq_q, seq_k]: strides of 0 along the axes that repeat.
struct DeviceMask {
  MaskKind kind = MaskKind::none;
  DType dtype = DType::f32;
  const void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0, key = 0;  // element strides
};

// Near keys and skipped halves of tiles (method, 8); near.cuh reads it.
struct DeviceNear {
  bool has;              // near keys
  bool has_window;       // else only sinks
  bool has_means;        // far scores keep the means of dropped columns
  bool keeps_means;      // and LSE counts them, else they only decide what is skipped
  std::int32_t sinks;    // in tiles of 128 keys
  std::int64_t rows;     // that have the same near keys, from row 0 on
  std::int64_t window;   // in keys
  std::int64_t offset;   // the key beside query 0
  std::int64_t means;    // of a KV head: one, or one for each block of queries
  bool skips, finishes;  // `skip` is above 0; kept halves are exact
  float log_skip;        // natural logarithm of `skip`
  float skip_log2;
};

struct DeviceProblem {
  std::int64_t batch, heads_q, heads_kv, seq_q, seq_k;
  std::int32_t head_dim, head_dim_v;
  Strides q, k, v, o;          // in elements
  float scale_log2;            // scale * log2(e): the kernels' scores are logarithms to the base 2
  bool causal;                 // or a window's right end, which hides as much
  std::int64_t causal_offset;  // query i sees the keys j <= i + causal_offset
  DeviceMask mask;
  // The grouping
  std::int64_t block;         // l
  Divisor rows_of_block;      // l, at most Nq: of rows that 31 bits count
  std::int64_t blocks;        // ceil(seq_q / l)
  std::int32_t groups;        // r
  std::int32_t members;       // of a group, but for a shorter last one: 1 where attention is exact
  bool mean;                  // Estimator::mean: q_hat is the group's mean, else its first column
  bool exact;                 // no order is read
  bool first_block_is_exact;  // order_from = previous, and the order is computed
  float softcap;              // no score exceeds it; 0: scores are not capped. It lies where alignment leaves room
  DeviceNear near;
  std::int64_t first_offset;  // of a window: query i sees the keys j >= i + first_offset
};

[[nodiscard]] inline DeviceMask device_mask(const Problem& problem) noexcept {
  const Mask& mask = problem.mask;
  DeviceMask result{mask.kind, mask.dtype, nullptr, 0, 0, 0, 0};
  std::int64_t* const strides[4] = {&result.batch, &result.head, &result.row, &result.key};
  for (int axis = 0; axis < mask.rank; ++axis) {
    const auto from = static_cast<std::size_t>(axis);
    if (mask.shape[from] != 1) {
      *strides[4 - mask.rank + axis] = mask.strides[from];
    }
  }
  return result;
}

[[nodiscard]] inline DeviceNear device_near(const Problem& problem, const Grouping& grouping) noexcept {
  DeviceNear result{};
  result.has = common::has_near_keys(grouping);
  result.has_window = grouping.window.has_value();
  result.sinks = static_cast<std::int32_t>(common::ceil_div(common::count_sinks(problem, grouping), common::kNearTile));
  result.rows = common::near_rows(problem, grouping);
  result.window = grouping.window.value_or(0);
  result.offset = common::near_offset(problem, grouping);
  result.has_means = common::has_key_means(grouping);
  result.keeps_means = common::keeps_key_means(grouping);
  result.means = common::num_key_means(problem, grouping);
  result.skips = grouping.skip > 0;
  result.finishes = grouping.finish;
  result.log_skip = static_cast<float>(std::log(grouping.skip));
  result.skip_log2 = static_cast<float>(std::log2(grouping.skip));
  return result;
}

// Whether something is done to scores behind the scale, but for hiding some by their place.
[[nodiscard]] __host__ __device__ inline bool changes_scores(const DeviceProblem& problem) noexcept {
  return problem.mask.kind != MaskKind::none || problem.softcap != 0;
}

[[nodiscard]] inline bool changes_scores(const Problem& problem) noexcept {
  return problem.mask.kind != MaskKind::none || problem.softcap != 0;
}

// All but where the mask is.
[[nodiscard]] inline DeviceProblem device_problem(const Problem& problem, const Grouping& grouping) noexcept {
  constexpr double kLog2E = 1.4426950408889634;
  const bool exact = is_exact(grouping);
  DeviceProblem result{};
  result.batch = problem.batch;
  result.heads_q = problem.heads_q;
  result.heads_kv = problem.heads_kv;
  result.seq_q = problem.seq_q;
  result.seq_k = problem.seq_k;
  result.head_dim = static_cast<std::int32_t>(problem.head_dim);
  result.head_dim_v = static_cast<std::int32_t>(problem.head_dim_v);
  result.q = problem.q;
  result.k = problem.k;
  result.v = problem.v;
  result.o = problem.o;
  result.scale_log2 = static_cast<float>(problem.softmax_scale() * kLog2E);
  const common::Band band = common::band_of(problem);
  result.causal = band.last != common::kUnlimited;
  // Ends that are far from all keys are as good somewhat nearer, where 32 bits count them.
  const std::int64_t far = 2 * (problem.seq_q + problem.seq_k);
  result.causal_offset = result.causal ? std::clamp(band.last, -far, far) : 0;
  result.first_offset = band.first == -common::kUnlimited ? band.first : std::clamp(band.first, -far, far);
  result.mask = device_mask(problem);
  result.block = grouping.block;
  result.rows_of_block = Divisor(static_cast<std::uint32_t>(std::min(grouping.block, problem.seq_q)));
  result.blocks = common::num_blocks(problem, grouping);
  result.groups = static_cast<std::int32_t>(exact ? problem.head_dim : num_groups(problem, grouping));
  result.members = exact ? 1 : static_cast<std::int32_t>(common::members_of(grouping));
  result.mean = grouping.estimator == Estimator::mean;
  result.exact = exact;
  result.first_block_is_exact = grouping.order_from == OrderFrom::previous && common::is_exact_block(grouping, 0);
  result.softcap = static_cast<float>(problem.softcap);
  result.near = device_near(problem, grouping);
  return result;
}

}  // namespace distr::cuda
