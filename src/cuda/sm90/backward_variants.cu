// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of the kernel in backward.cuh, for both element types:
//   d = 64    exact, r = 32
//   d = 128   exact, r = 64, r = 32
// Columns are padded with zeros by TMA, so each serves every smaller r and dv as well.
// A new head dim is a line here.
#include "cuda/sm90/backward_variants.h"

#include <array>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward_tail.cuh"

namespace distr::cuda::sm90 {
namespace {

template <class C>
[[nodiscard]] std::int64_t blocks_of_keys(const BackwardParameters& p) {
  return p.lengths.packed ? count_packed_tiles(p.lengths.total_k, p.problem.batch, C::kKeys) * p.problem.heads_q
                          : (p.problem.seq_k + C::kKeys - 1) / C::kKeys * p.problem.batch * p.problem.heads_q;
}

template <class C>
void launch_backward(const BackwardParameters& p, void* stream) {
  allow_shared_memory<backward<C>, sizeof(BackwardStorage<C>)>();
  const std::int64_t ctas = p.split.thread_blocks(blocks_of_keys<C>(p), p.problem.batch * p.problem.heads_q);
  launch_dependent(backward<C>, dim3(static_cast<unsigned>(ctas)), C::kThreads, sizeof(BackwardStorage<C>), stream, p);
}

template <class C>
void launch_add_pieces(const BackwardParameters& p, void* stream) {
  const std::int64_t split = p.split.count(blocks_of_keys<C>(p), p.problem.batch * p.problem.heads_q);
  const bool only_d_k = p.split.sinks > 0 && p.d_v_parts == nullptr;  // see add_near_values()
  static_assert(C::kColumns % kAddedColumns == 0 && C::kValues % kAddedColumns == 0);
  const unsigned parts = (C::kColumns + (only_d_k ? 0 : C::kValues)) / kAddedColumns;
  launch_dependent(add_pieces<typename C::Element>, dim3(static_cast<unsigned>(split), parts), kAddingThreads, 0,
                   stream, p, C::kColumns, C::kValues);
}

template <class C>
constexpr BackwardVariant variant() {
  static_assert(C::kKeys == kKeyTileRows);
  return {kDTypeOf<typename C::Element>,
          C::kColumns,
          C::kValues,
          C::kCapsScores,
          C::kTakesLengths,
          C::kThreads,
          static_cast<int>(sizeof(BackwardStorage<C>)),
          &launch_backward<C>,
          &launch_add_pieces<C>};
}

template <template <int, int> class C>
constexpr std::array kShapes = {variant<C<32, 64>>(), variant<C<64, 64>>(), variant<C<32, 128>>(),
                                variant<C<64, 128>>(), variant<C<128, 128>>()};

template <int kColumns, int kValues>
using Half = BackwardConfig<__half, kColumns, kValues>;
template <int kColumns, int kValues>
using Bfloat = BackwardConfig<__nv_bfloat16, kColumns, kValues>;

constexpr auto kVariants = [] {
  std::array<BackwardVariant, kShapes<Half>.size() + kShapes<Bfloat>.size()> all{};
  std::copy(kShapes<Bfloat>.begin(), kShapes<Bfloat>.end(),
            std::copy(kShapes<Half>.begin(), kShapes<Half>.end(), all.begin()));
  return all;
}();

}  // namespace

std::span<const BackwardVariant> backward_variants() { return kVariants; }

}  // namespace distr::cuda::sm90
