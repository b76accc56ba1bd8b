// SPDX-License-Identifier: Apache-2.0
// The two products of attention by a warpgroup: P in registers, k_hat and V in shared memory, q_hat in either.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/sm90/config.h"
#include "cuda/sm90/ptx.cuh"

namespace distr::cuda::sm90 {

// A tile in shared memory as wgmma's descriptors see it: the permutation of its rows, the distance of eight rows, and
// the address of 16 columns or rows, in units of 16 bytes.
template <class P>
struct SharedOperand {
  static constexpr std::uint32_t kMode = P::kRowBytes == 128 ? 1 : P::kRowBytes == 64 ? 2 : 3;
  static constexpr std::uint32_t kHigh = kMode << 30 | 8 * P::kRowBytes / 16;

  std::uint32_t start;

  __device__ explicit SharedOperand(std::uint32_t tile) : start((tile & 0x3FFFF) / 16) {}

  // Columns 16 step .. of the rows from `first` on, which lie along k.
  [[nodiscard]] __device__ std::uint64_t k_major(int first, int step) const {
    constexpr int kStepsPerPanel = P::kPanelColumns / 16;
    return descriptor(1, step / kStepsPerPanel * P::kPanelBytes + first * P::kRowBytes + step % kStepsPerPanel * 32);
  }
  // The 16 rows from `row` on, which lie along k, of the columns from `column` on, which begin a panel.
  [[nodiscard]] __device__ std::uint64_t mn_major(int row, int column) const {
    return descriptor(P::kPanelBytes / 16, column / P::kPanelColumns * P::kPanelBytes + row * P::kRowBytes);
  }

 private:
  [[nodiscard]] __device__ std::uint64_t descriptor(std::uint32_t next_panel, int offset) const {
    return std::uint64_t{kHigh} << 32 | (start + (next_panel << 16 | static_cast<std::uint32_t>(offset / 16)));
  }
};

// 64 rows of a tile, those from `first` on, as left operand: in registers.
template <class P>
class RegisterOperand {
 public:
  __device__ __forceinline__ RegisterOperand(std::uint32_t tile, int first) {
    const unsigned lane = threadIdx.x % 32;
    const unsigned row = static_cast<unsigned>(first) + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    constexpr unsigned kPanelChunks = P::kRowBytes / 16;  // of 16 bytes in a row of a panel
#pragma unroll
    for (unsigned step = 0; step < P::kColumns / 16; ++step) {
      const unsigned chunk = step * 2 + lane / 16;
      const unsigned place = chunk % kPanelChunks ^ row * P::kRowBytes / 128 % kPanelChunks;
      ptx::ldmatrix_x4(rows_[step], tile + chunk / kPanelChunks * P::kPanelBytes + row * P::kRowBytes + place * 16);
    }
  }
  template <class T, ptx::Major kRight = ptx::Major::k, int kSums>
  __device__ __forceinline__ void multiply(float (&sum)[kSums], int step, std::uint64_t right, unsigned /*opaque_zero*/,
                                           bool adds) const {
    ptx::wgmma<kRight>(sum, rows_[step], right, adds, T{});
  }

 private:
  std::uint32_t rows_[P::kColumns / 16][4];
};

// The same, left in shared memory.
template <class P>
class SharedOperandRows {
 public:
  __device__ __forceinline__ SharedOperandRows(std::uint32_t tile, int first)
      : rows_(tile + static_cast<std::uint32_t>(first) * P::kRowBytes) {}
  template <class T, ptx::Major kRight = ptx::Major::k, int kSums>
  __device__ __forceinline__ void multiply(float (&sum)[kSums], int step, std::uint64_t right, unsigned opaque_zero,
                                           bool adds) const {
    ptx::wgmma<ptx::Major::k, kRight>(sum, SharedOperand<P>(rows_ + opaque_zero).k_major(0, step), right, adds, T{});
  }

 private:
  std::uint32_t rows_;
};

// q_hat of a consumer's 64 rows.
template <class C>
using Queries = std::conditional_t<C::kQueriesInShared, SharedOperandRows<typename C::QueryTile>,
                                   RegisterOperand<typename C::QueryTile>>;

// Issues S = q_hat k_hat^T for half a tile, whose first key `first` is, or a whole one.
template <class C, int kSums>
__device__ __forceinline__ void issue_scores_product(float (&s)[kSums], const Queries<C>& queries, std::uint32_t tile,
                                                     int first) {
  using T = typename C::Element;
  static_assert(kSums == C::kHalf / 2 || kSums == C::kKeys / 2);
  const SharedOperand<typename C::KeyTile> keys(tile);
#pragma unroll
  for (int step = 0; step < C::kColumns / 16; ++step) {
    if constexpr (C::KeyLoader::kTransposed) {
      queries.template multiply<T, ptx::Major::mn>(s, step, keys.mn_major(step * 16, first), 0, step > 0);
    } else {
      queries.template multiply<T, ptx::Major::k>(s, step, keys.k_major(first, step), 0, step > 0);
    }
  }
  ptx::wgmma_commit();
}

// Issues O += P V for half a tile.
template <class C>
__device__ __forceinline__ void issue_output_product(float (&o)[C::kValues / 2],
                                                     const std::uint32_t (&probabilities)[C::kHalf / 16][4],
                                                     std::uint32_t tile, int first) {
  C::Stages::values([&] {
    const SharedOperand<typename C::ValueTile> values(tile);
#pragma unroll
    for (int step = 0; step < C::kHalf / 16; ++step) {
      ptx::wgmma<ptx::Major::mn>(o, probabilities[step], values.mn_major(first + step * 16, 0), true,
                                 typename C::Element{});
    }
  });
  ptx::wgmma_commit();
}

}  // namespace distr::cuda::sm90
