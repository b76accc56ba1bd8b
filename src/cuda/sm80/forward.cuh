// SPDX-License-Identifier: Apache-2.0
// O = softmax(cap(scale * q_hat k_hat^T) + mask) V with mma.sync, for sm_80 and later (paper, Section 3.3).
//
//   A thread block takes kRows queries of one head, and each of its 4 warps takes 16 * kRowTiles of them. It computes
//     q_hat                                                          Queries (queries.cuh)
//     for every tile of kKeys keys, in kParts that overlap:
//       S = q_hat k_hat^T                       [kRows, kKeys]       Keys (keys.cuh), by mma.sync
//       P = 2^(scale * S - rowmax), rowsum      in registers         Softmax (softmax.cuh)
//       O += P V                                [kRows, dv]          in registers
//     O / rowsum and LSE; or, for one split of a tile's keys (split_kv.h), the partial results that combine_splits()
//     combines.
//   kSequences (sm80-sequences): a tile has the rows of all query heads of a KV head, which read K and V once, and a
//   thread block makes its own parameters first (cuda/sequence.cuh). Warps that have no row compute nothing.
//   In the first pass a row's maximum is that of its first tile and then fixed, or online under a mask tensor. Where
//   q_hat has the scale in it (bf16, no LSE) there is none: P = 2^S. Rows whose P or O left the number range are
//   computed once more, in a second pass whose row max is online, and with kHeadroom for V.
//   Shared memory: SharedStorage (storage.cuh). Q or q_hat, which both passes read; two stages of (k_hat, V), in whose
//   place a copy of Q lies while q_hat is made from it; the row offsets of K^T; and the state that there are no
//   registers for (CtaState).
//   Pipeline: while the warps compute tile j, cp.async copies tile j + 1 to the other stage. Where columns of K must be
//   summed (lsh), the copies go to a raw tile; each thread loads its members to registers before O += P V and stores
//   their sums after it. There is one barrier for each tile.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/sm80/config.h"
#include "cuda/sm80/keys.cuh"
#include "cuda/sm80/queries.cuh"
#include "cuda/sm80/softmax.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/tile_scheduler.cuh"

namespace distr::cuda::sm80 {

// All rows of a thread, which has 2 in each of the warp's m16 tiles; one bit stands for one row.
template <class C>
inline constexpr unsigned kAllRows = (1U << 2 * C::kRowTiles) - 1;

// The rows whose O is finite, and for which a fixed row max, one that was not online from tile `online_end` on, was
// good enough: the row saw a key, the row max was not too large, no score was so far above it that P left the element
// type's range or O left fp32's, and, without a row max, not all were far below 0. A P out of range shows in O, which
// is then not finite. Each row is judged by itself, because its bits must not depend on the rows beside it, which may
// be later ones. last: tiles end there.
template <class C>
__device__ inline unsigned rows_in_range(const float (&o)[C::kRowTiles][C::kDim / 8][4], const Softmax<C>& softmax,
                                         int online_end, int last, bool without_row_max = false) {
  const unsigned quad = 0xFU << ptx::opaque(threadIdx.x) % 32 / 4 * 4;
  unsigned rows = 0;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float zero = 0;  // NaN where O is not finite
#pragma unroll
      for (int n = 0; n < C::kDim / 8; ++n) {
        zero = fmaf(o[tile][n][half * 2], 0.0F, fmaf(o[tile][n][half * 2 + 1], 0.0F, zero));
      }
      const float sum = quad_sum(softmax.row_sum[tile][half]);
      const float row_max = softmax.row_max[tile][half];
      const bool is_exact = online_end >= kAllTiles || fabsf(row_max) < Softmax<C>::kMaxRowMax ||
                            (online_end >= last && row_max == Softmax<C>::kNoRowMax);
      const bool is_large = !without_row_max || sum > Softmax<C>::kMinSum;
      const bool fits = zero == 0.0F && is_large && sum < Softmax<C>::kMaxSum && is_exact;
      rows |= (__ballot_sync(~0U, fits) & quad) == quad ? 1U << (tile * 2 + half) : 0;
    }
  }
  return C::Stages::kRepeatsRows ? rows : kAllRows<C>;
}

// What O is multiplied with: 1 / row_sum, and its headroom. A row that sees no key has O = 0.
[[nodiscard]] __device__ inline float inverse_of(float row_sum, float headroom) {
  return row_sum == 0.0F ? 0.0F : 1.0F / row_sum * headroom;
}

// Divides O of a warp by the row sums and writes the rows in `rows`, with their LSE. O is in the layout of the mma's
// accumulators: a lane holds the rows lane / 4 (+ 8) and the columns 8 n + 2 (lane % 4) (+ 1).
template <class C>
__device__ inline void store(const ForwardParameters& p, const Work& work, int warp_row, unsigned rows,
                             const float (&o)[C::kRowTiles][C::kDim / 8][4], const Softmax<C>& softmax,
                             float headroom) {
  using T = typename C::Element;
  const DeviceProblem& problem = p.problem;
  const int lane = static_cast<int>(ptx::opaque(threadIdx.x) % 32);
  T* const base =
      static_cast<T*>(p.o) + work.batch * problem.o.batch + (C::kSequences ? 0 : work.head * problem.o.head);
  const int width = C::kSequences ? min(vector_width(base, problem.o.row), vector_width(base, problem.o.head))
                                  : vector_width(base, problem.o.row);
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = work.row + warp_row + tile * 16 + half * 8 + lane / 4;
      const float sum = quad_sum(softmax.row_sum[tile][half]);
      const bool is_valid = row < p.row_end && (rows >> (tile * 2 + half) & 1) != 0;
      const RowPlace at = place_of<C>(p, work.head, row);
      if (is_valid && p.lse != nullptr && lane % 4 == 0) {
        p.lse[lse_index<C>(p, work.batch, at)] = natural_lse(softmax.row_max[tile][half], sum);
      }
      const float inverse = inverse_of(sum, headroom);
      T* const to = base + at.query * problem.o.row + (C::kSequences ? at.head * problem.o.head : 0);
      store_row<C::kDim>(to, is_valid, problem.head_dim_v, width, [&](int n) {
        return make_float2(o[tile][n][half * 2] * inverse, o[tile][n][half * 2 + 1] * inverse);
      });
    }
  }
}

// Writes the result of one split of a tile's keys: O, the row max and the row sum.
template <class C>
__device__ inline void store_partial(const SplitKv& split, unsigned partial, int warp_row, unsigned rows,
                                     const float (&o)[C::kRowTiles][C::kDim / 8][4], const Softmax<C>& softmax,
                                     float headroom) {
  const int lane = static_cast<int>(ptx::opaque(threadIdx.x) % 32);
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = std::int64_t{partial} * C::kRows + warp_row + tile * 16 + half * 8 + lane / 4;
      const float sum = quad_sum(softmax.row_sum[tile][half]);
      if ((rows >> (tile * 2 + half) & 1) == 0) {
        continue;
      }
      if (lane % 4 == 0) {
        split.row_stats[row] = {softmax.row_max[tile][half], sum};
      }
      const float inverse = inverse_of(sum, headroom);
      auto* const to = reinterpret_cast<float2*>(split.o + row * C::kDim) + lane % 4;
#pragma unroll
      for (int n = 0; n < C::kDim / 8; ++n) {
        to[n * 4] = {o[tile][n][half * 2] * inverse, o[tile][n][half * 2 + 1] * inverse};
      }
    }
  }
}

// Computes P of tile j. In a plain tile (no mask, a fixed row max) the exponentials of the first part run under
// the scores of the next part, and those of the last part run under O += P V of the part before it. In other tiles all
// scores are computed first.
template <class C>
__device__ __forceinline__ void exponentiate(
    const ForwardParameters& p, const CtaState<C>& state, bool is_plain, const typename C::Keys& keys,
    const typename C::Queries& queries, int warp_row, int j, Softmax<C>& softmax,
    float (&o)[C::kRowTiles][C::kDim / 8][4],
    std::uint32_t (&probabilities)[C::kParts][C::kPartKeys / 16][C::kRowTiles][4]) {
  ScoreFragment<C> s[C::kParts];
  const auto other_scores = [&](int tile) {
#pragma unroll
    for (int part = 1; part < C::kParts; ++part) {
      keys.scores(s[part], queries, tile, part);
    }
  };
  keys.scores(s[0], queries, j, 0);
  if (!is_plain) {
    // The opaque tile keeps the compiler from merging this call with the one in the other branch and hoisting it.
    other_scores(static_cast<int>(ptx::opaque(static_cast<unsigned>(j))));
    if (state.online_end >= kAllTiles) {
#pragma unroll
      for (ScoreFragment<C>& part : s) {
        scale_scores(part, p.problem.scale_log2);
        if (C::kMasks && p.problem.softcap != 0) {
          cap_scores(part, p.problem.softcap);
        }
      }
    }
    if (j >= state.unmasked || j < first_whole_tile<C>(p.problem, state.work)) {
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        apply_mask<C>(s[part], p, state.work, warp_row, j * C::kKeys + part * C::kPartKeys,
                      static_cast<int>(threadIdx.x) % 32);
      }
    }
    if (j < state.online_end) {
      softmax.update_row_max(s, o);
    }
    softmax.make_exponents(s);
    softmax.exponentials(s[0], probabilities[0]);
  } else if (scale_in_queries<C>(p) && !kMakesExponents<C>) {
    other_scores(j);
    softmax.template exponentials<ExponentialsOf::exponents>(s[0], probabilities[0]);
  } else {
    other_scores(j);
    if (!scale_in_queries<C>(p)) softmax.make_exponents(s);
    softmax.exponentials(s[0], probabilities[0]);
  }
#pragma unroll
  for (int part = 1; part < C::kParts; ++part) {
    softmax.exponentials(s[part], probabilities[part]);
  }
}

// O += P V over the keys 16 first .. 16 (first + kSteps) - 1 of that part of a tile which begins at key `begin`.
template <class C, int kSteps>
__device__ __forceinline__ void accumulate(float (&o)[C::kRowTiles][C::kDim / 8][4],
                                           const std::uint32_t (&probabilities)[C::kPartKeys / 16][C::kRowTiles][4],
                                           std::uint32_t value, int begin, int first) {
  C::Stages::values([&] {
#pragma unroll
    for (int step = first; step < first + kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < C::kDim / 16; ++n) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Tile<C::kDim>::move(value, begin + step * 16, n * 2));
#pragma unroll
        for (int tile = 0; tile < C::kRowTiles; ++tile) {
          ptx::mma_16x8x16(o[tile][2 * n], probabilities[step][tile], b[0], b[1], typename C::Element{});
          ptx::mma_16x8x16(o[tile][2 * n + 1], probabilities[step][tile], b[2], b[3], typename C::Element{});
        }
      }
    }
  });
}

// Those of batch entry b.
template <class T>
__device__ inline void enter(ForwardParameters& p, std::int64_t b) {
  const DeviceSequence sequence(p.problem, p.lengths, b);
  advance<T>(p.q, entry_offset(p.lengths, p.problem.q, b, sequence.first_row));
  advance<T>(p.k, entry_offset(p.lengths, p.problem.k, b, sequence.first_key));
  advance<T>(p.v, entry_offset(p.lengths, p.problem.v, b, sequence.first_key));
  advance<T>(p.o, entry_offset(p.lengths, p.problem.o, b, sequence.first_row));
  if (p.lse != nullptr) {
    p.lse += lse_offset(p.lengths, p.problem, b, sequence.first_row);
  }
  p.row_end = sequence.rows * static_cast<std::int64_t>(p.heads_of_row.value());
  enter(p.problem, p.lengths, sequence);
}

// What a thread block reads: what was launched, or its own.
template <class C>
[[nodiscard]] __device__ inline const ForwardParameters& parameters_of(const ForwardParameters& launched,
                                                                       SharedStorage<C>& storage) {
  if constexpr (C::kSequences) {
    return storage.own.make(launched, [&](ForwardParameters& own) {
      enter<typename C::Element>(own, launched.scheduler.at(launched.split.at(blockIdx.x).tile).batch);
    });
  } else {
    return launched;
  }
}

// This thread's rows that there are, a bit each.
template <class C>
[[nodiscard]] __device__ inline unsigned rows_there(const ForwardParameters& p, const Work& work, int warp_row) {
  if constexpr (C::kSequences) {
    unsigned rows = 0;
    for (int bit = 0; bit < 2 * C::kRowTiles; ++bit) {
      const int row = work.row + warp_row + bit * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
      rows |= row < p.row_end ? 1U << bit : 0;
    }
    return rows;
  } else {
    return kAllRows<C>;
  }
}

// The state before the first pass, but for the rows that are not written.
template <class C>
__device__ __forceinline__ void begin(CtaState<C>& state, const ForwardParameters& p, const Work& work) {
  const bool all_online = C::kMasks && changes_scores(p.problem);
  state.work = work;
  state.unmasked = unmasked_tiles<C>(p, work);
  // At a left end one tile more: the first key of a row may be the first of a tile that is whole.
  state.online_end = all_online               ? kAllTiles
                     : scale_in_queries<C>(p) ? work.first
                                              : max(work.first, first_whole_tile<C>(p.problem, work)) + 1;
  state.keys = C::Keys::source(p, work);
  state.values = head_of(p.v, p.problem.v, work.batch, work.head_kv);
}

// The softmax at the beginning of a pass.
template <class C>
[[nodiscard]] __device__ inline Softmax<C> softmax_before(const ForwardParameters& p, int online_end) {
  const bool all_online = online_end >= kAllTiles;
  const bool has_row_max = all_online || !scale_in_queries<C>(p);
  return Softmax<C>(all_online ? 1.0F : p.problem.scale_log2, has_row_max ? Softmax<C>::kNoRowMax : 0.0F);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    forward(const __grid_constant__ ForwardParameters launched) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& storage = *reinterpret_cast<SharedStorage<C>*>(shared);
  const std::uint32_t base = ptx::shared_address(shared);
  static_assert(fits<C>());
  launch_dependent_grids();
  wait_on_dependent_grids();
  const ForwardParameters& p = parameters_of<C>(launched, storage);
  const DeviceProblem& problem = p.problem;
  const auto warp_row_of = [](unsigned thread) { return static_cast<int>(thread / 32) * 16 * C::kRowTiles; };
  CtaState<C> own;
  CtaState<C>* state = &own;
  if constexpr (C::kStateInShared) {
    state = &storage.state;
  }
  const auto thread = [] { return ptx::opaque(threadIdx.x); };

  const Work work = Work::of(blockIdx.x, p, C{});
  if (C::kSequences && work.row >= p.row_end) return;
  const bool computes = !C::kSequences || work.row + warp_row_of(threadIdx.x) < p.row_end;  // the warp
  state->set_unwritten(rows_there<C>(p, work, warp_row_of(threadIdx.x)));
  if (!C::kStateInShared || threadIdx.x == 0) {
    begin<C>(*state, p, work);
  }
  __syncthreads();
  typename C::Queries queries(p, work, storage, warp_row_of(threadIdx.x));
  typename C::Keys keys(p, work, storage);
  const auto copy_values = [&](const std::uint16_t* values, int j) {
    const int key = j * C::kKeys;
    C::Stages::values([&] {
      copy_tile<C::kKeys, C::kDim, C::kThreads>(value_tile<C>(base, j), row_of(values, problem.v.row, key),
                                                problem.v.row, rows_left(key, problem.seq_k), problem.head_dim_v);
    });
  };

  bool again;
  do {
    float o[C::kRowTiles][C::kDim / 8][4] = {};
    Softmax<C> softmax = softmax_before<C>(p, state->online_end);
    const int first = state->work.first;
    const int last = state->work.last;
    if (first < last) {
      keys.copy(state->keys, keys.prefetched(), first);
      copy_values(state->values, first);
    }
    ptx::cp_async_commit();
    if (C::kMembers > 1 && first < last) {
      ptx::cp_async_wait<0>();
      for (int step = 0; step < C::kParts * C::Keys::kFuseSteps; ++step) {
        C::Stages::fusion([&] {
          keys.load_members(step);
          keys.store_sums(first, step);
        });
      }
    }

    for (int j = first; j < last; ++j) {
      // These loads from shared memory come before the wait, which hides their latency, as far as registers allow.
      const std::uint16_t* const all_keys = state->keys;
      const std::uint16_t* const all_values = state->values;
      const auto prefetched = keys.prefetched();
      const bool repeats = kHeadroom<C> != 1 && state->online_end == kRepeated;
      bool is_plain = C::kPrefetchesState && state->is_plain(j);
      ptx::cp_async_wait<0>();
      __syncthreads();  // tile j has arrived, and no warp reads the other stage any more
      if (repeats) {
        make_headroom<C>(storage.stages.values[j % C::kStages]);
      }
      if (j + 1 < last) {
        keys.copy(all_keys, prefetched, j + 1);
        ptx::cp_async_commit();
        copy_values(all_values, j + 1);
      }
      ptx::cp_async_commit();

      if (!computes) continue;
      std::uint32_t probabilities[C::kParts][C::kPartKeys / 16][C::kRowTiles][4];
      is_plain = C::kPrefetchesState ? is_plain : state->is_plain(j);
      exponentiate<C>(p, *state, is_plain, keys, queries, warp_row_of(thread()), j, softmax, o, probabilities);
      const auto lane = static_cast<int>(thread() % 32);
      const std::uint32_t value = value_tile<C>(base, j).at(lane % 16, lane / 16);
      if (C::kMembers > 1) {
        ptx::cp_async_wait<1>();
      }
      constexpr int kFuseSteps = C::Keys::kFuseSteps;
      constexpr int kMmaSteps = C::kPartKeys / 16 / kFuseSteps;  // of the second product, for each of them
#pragma unroll
      for (int step = 0; step < C::kParts * kFuseSteps; ++step) {
        const int part = step / kFuseSteps;
        C::Stages::fusion([&] { keys.load_members(step); });
        accumulate<C, kMmaSteps>(o, probabilities[part], value, part * C::kPartKeys, step % kFuseSteps * kMmaSteps);
        C::Stages::fusion([&] { keys.store_sums(j + 1, step); });  // behind the last tile it stores what nobody reads
      }
    }

    const unsigned rows = state->unwritten();
    const int online_end = state->online_end;
    const unsigned in_range = online_end == kRepeated
                                  ? kAllRows<C>
                                  : rows_in_range<C>(o, softmax, online_end, state->work.last, scale_in_queries<C>(p));
    const float headroom = online_end == kRepeated ? kHeadroom<C> : 1.0F;
    const unsigned cta = ptx::opaque(blockIdx.x);
    if (p.split.at(cta).count > 1) {
      store_partial<C>(p.split, cta - p.split.begin, warp_row_of(thread()), rows & in_range, o, softmax, headroom);
    } else {
      store<C>(p, state->work, warp_row_of(thread()), rows & in_range, o, softmax, headroom);
    }
    __syncwarp();  // all threads of the quad have read the rows before one of them writes new ones
    state->set_unwritten(rows & ~in_range);
    again = __syncthreads_or(static_cast<int>(rows & ~in_range)) != 0;
    if (again) {  // the same for all threads
      if (!C::kStateInShared || thread() == 0) {
        state->online_end = kRepeated;
      }
      __syncthreads();  // the next pass reads `online_end` before its first barrier
    }
  } while (again);
}

}  // namespace distr::cuda::sm80
