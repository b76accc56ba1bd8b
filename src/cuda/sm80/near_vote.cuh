// SPDX-License-Identifier: Apache-2.0
// How 64 rows decide whether they keep a far half (method, 8), and what they keep is counted (near.cuh).
#pragma once

#include "cuda/sm80/near_storage.cuh"
#include "cuda/sm80/softmax.cuh"

namespace distr::cuda::sm80 {

// Visits this thread's rows, one in each eight of its m16 tiles: visit(tile, eight, row); `row` is the thread block's.
template <class C, class Visit>
__device__ __forceinline__ void each_row(const Visit& visit) {
  const int thread = static_cast<int>(ptx::opaque(threadIdx.x));
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      visit(tile, eight, thread / 32 * 16 * C::kRowTiles + tile * 16 + eight * 8 + thread % 32 / 4);
    }
  }
}

// What a warp's rows take from their near keys to the far ones: limits, and the row max.
template <class C>
__device__ __forceinline__ void begin_far_keys(const ForwardParameters& p, int first_row, NearStorage<C>& storage,
                                               Softmax<C>& softmax) {
  const DeviceNear& near = p.problem.near;
  each_row<C>([&](int tile, int eight, int row) {
    const float near_sum = quad_sum(softmax.row_sum[tile][eight]);
    const float lse = near_sum == 0.0F ? -INFINITY : softmax.row_max[tile][eight] + log2f(near_sum);
    const float dropped = storage.dropped[row];
    if (ptx::opaque(threadIdx.x) % 4 == 0) {
      storage.limits[row] = first_row + row < p.row_end ? (lse + near.skip_log2 - dropped) / softmax.scale : INFINITY;
    }
    softmax.row_max[tile][eight] -= near.keeps_means ? dropped : 0.0F;
  });
  __syncwarp();
}

// The threads of 64 rows, which skip together.
template <class C>
inline constexpr int kVoters = C::kThreads* static_cast<int>(common::kSkipRows) / C::kRows;

// The number of this thread's 64 rows among the thread block's.
template <class C>
[[nodiscard]] __device__ inline int voters_of(unsigned thread) {
  return static_cast<int>(thread) / kVoters<C>;
}

// Whether one of 64 rows has a score above limit_of(row). NaN is.
template <class C, class LimitOf>
[[nodiscard]] __device__ __forceinline__ bool vote(const float (&maxima)[C::kRowTiles][2], const LimitOf& limit_of) {
  bool above = false;
  each_row<C>([&](int tile, int eight, int row) {
    const float largest = maxima[tile][eight];
    above |=
        !(largest <= limit_of(row)) && largest != -INFINITY;  // -inf: the row sees no key, and its limit may be NaN
  });
  return ptx::named_barrier_or(1 + voters_of<C>(ptx::opaque(threadIdx.x)), kVoters<C>, above);
}

// Whether this thread, the first of its 64 rows, counts halves; and the functions for that, of which all threads call
// count_half.
template <class C>
[[nodiscard]] __device__ inline bool counts_halves(const NearParameters& parameters) {
  return parameters.halves != nullptr && ptx::opaque(threadIdx.x) % kVoters<C> == 0;
}

template <class C>
__device__ inline void begin_counts(HalfCounts& counts, const ForwardParameters& p, const Work& work) {
  const std::int64_t row = work.row + voters_of<C>(ptx::opaque(threadIdx.x)) * common::kSkipRows;
  const std::int64_t keys = row < p.row_end ? visible_keys(p.problem, min(row + common::kSkipRows, p.row_end) - 1) : 0;
  counts = {0, 0, work.first, static_cast<int>((keys + C::kKeys - 1) / C::kKeys)};
}

template <class C>
__device__ inline void count_half(const NearParameters& parameters, NearStorage<C>& storage, bool has_mask, int half,
                                  bool keeps, const float (&maxima)[C::kRowTiles][2]) {
  const bool sees_any =
      has_mask && vote<C>(maxima, [&](int row) { return storage.limits[row] == INFINITY ? INFINITY : -INFINITY; });
  if (counts_halves<C>(parameters)) {
    HalfCounts& counts = storage.counts[voters_of<C>(ptx::opaque(threadIdx.x))];
    const bool sees =
        has_mask ? sees_any : half >= counts.first && half < counts.end;  // the first row or the last does
    counts.seen += sees ? 1 : 0;
    counts.kept += keeps ? 1 : 0;
  }
}

template <class C>
__device__ inline void store_counts(const HalfCounts& counts, const NearParameters& parameters, const Work& work) {
  const ForwardParameters& p = parameters.forward;
  const std::int64_t row = work.row + voters_of<C>(ptx::opaque(threadIdx.x)) * common::kSkipRows;
  if (row < p.row_end) {
    const std::int64_t groups = (p.problem.seq_q + common::kSkipRows - 1) / common::kSkipRows;
    const std::int64_t head = work.batch * p.problem.heads_q + work.head;
    std::int32_t* const to = parameters.halves + 2 * (head * groups + row / common::kSkipRows);
    to[0] = counts.kept;
    to[1] = counts.seen;
  }
}

}  // namespace distr::cuda::sm80
