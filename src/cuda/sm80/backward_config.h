// SPDX-License-Identifier: Apache-2.0
// The compiled shapes of the sm_80 backward kernels. Everything that sizes registers or shared memory is here.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/problem.h"
#include "cuda/sequence.cuh"
#include "cuda/sm80/shared_tile.h"

namespace distr::cuda::sm80 {

inline constexpr int kBackwardStages = 2;

template <class C>
class RegisterRows;
template <class C>
class SharedRows;
template <class C>
struct DkDvStorage;
template <class C>
struct DqStorage;
template <class C>
struct ConvertDqStorage;

enum class Masks : std::uint8_t { none, tensors };     // what a kernel serves beside causality
enum class Gradients : std::uint8_t { of_keys, all };  // dK and dV, or dQ too, in an order that changes

// dK and dV: a thread block owns kKeys keys of a KV head and meets tiles of kRows queries. kDim: d and dv, padded.
template <class T, int kDim_, Masks kServes, Gradients kGives>
struct DkDvShape {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr bool kMasks = kServes == Masks::tensors;
  static constexpr bool kAccumulatesDq = kGives == Gradients::all;
  static constexpr int kWarps = kDim == 128 && kAccumulatesDq ? 8 : 4;  // 8: half as many sums of dQ
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeyTiles = kDim <= 64 && !kMasks ? 2 : 1;  // m16 tiles of a warp
  static constexpr int kKeys = kWarps * 16 * kKeyTiles;
  static constexpr int kRows = kDim == 256 ? 16 : kDim == 128 && kMasks ? 32 : 64;
  // Thread blocks that share the keys' columns, for which one has not the registers.
  static constexpr int kParts = kDim == 256 ? 2 : 1;
  static constexpr int kColumns = kDim / kParts;
  // Serves sliding windows with a left end, for which one has no registers left.
  static constexpr bool kWindows = kMasks || kDim != 64;
  static constexpr bool kResident = !kMasks && kDim <= 128;  // K and V stay in registers, else in shared memory
  using OwnRows = std::conditional_t<kResident, RegisterRows<DkDvShape>, SharedRows<DkDvShape>>;
  using Storage = DkDvStorage<DkDvShape>;
  static constexpr int kCtasPerSm = kDim == 32 ? 3 : kWarps == 8 ? 1 : 2;
  static constexpr int kSharedLimit = kWarps == 8 ? kMaxSharedBytesOfServers : kMaxSharedBytes;

  // A warp adds dQ in subtiles of kSumTiles m16 tiles and kSumColumns columns.
  static constexpr int kSumTiles = kResident || kRows == 16 ? 1 : 2;
  static constexpr int kSumColumns = 32;
};

// dQ: a thread block owns kRows queries of a head and meets tiles of kKeys keys.
template <class T, int kDim_, Masks kServes>
struct DqShape {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr bool kMasks = kServes == Masks::tensors;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kDim <= 128 && !kMasks ? 2 : 1;  // m16 tiles of a warp
  static constexpr int kRows = kWarps * 16 * kRowTiles;
  static constexpr int kKeys = kDim == 256 ? 16 : kDim == 32 ? 128 : 32;
  static constexpr int kKeysPerStep = std::min(kKeys, 32);  // keys whose scores are in registers at the same time
  static constexpr int kCtasPerSm = kDim <= 64 ? 3 : 2;

  using Storage = DqStorage<DqShape>;
  static constexpr int kPitch = kDim + 8;  // floats of a row of dQ~ in shared memory
};

// dQ from sums in memory: a thread block takes kRows queries of a head.
template <class T, int kDim_>
struct ConvertDqShape {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTiles = 1;
  static constexpr int kRows = kWarps * 16 * kRowTiles;
  static constexpr int kCtasPerSm = kDim == 256 ? 2 : 4;
  using Storage = ConvertDqStorage<ConvertDqShape>;
  static constexpr int kPitch = kDim + 8;  // floats of a row of dQ~ in shared memory
};

// The kernels count all addresses in their storage from that of its beginning: for each that is found by itself the
// compiler keeps one more register. In the place of what a kernel has no use for there is a type that takes no memory:
struct NoKeys {};
struct NoValues {};
struct NoDs {};

// A thread block's shared memory in backward_dkdv. K and V of the block's keys lie there as far as they stay, K in any
// case if dQ is added. Where they do not stay they pass through it.
template <class C>
struct DkDvStorage {
  using OwnTile = SharedTile<C::kKeys, C::kDim>;
  using DsTile = SharedTile<C::kKeys, C::kRows>;  // dS^T
  struct Own {
    OwnTile keys, values;
  };
  struct Stage {
    SharedTile<C::kRows, C::kDim> queries, d_o;  // Q~ and dO
  };
  struct MainLoop {
    [[no_unique_address]] std::conditional_t<C::kResident && !C::kAccumulatesDq, NoKeys, OwnTile> keys;
    [[no_unique_address]] std::conditional_t<C::kResident, NoValues, OwnTile> values;
    [[no_unique_address]] std::conditional_t<C::kAccumulatesDq, DsTile, NoDs> d_s;
    Stage stages[kBackwardStages];
    float2 stats[kBackwardStages][C::kRows];  // -LSE to the base 2, and D
  };
  union {
    Own own;
    MainLoop loop;
  };
};

// dQ~ of a thread block, and of each warp the columns' places in the order.
template <class C>
struct DqEpilogue {
  alignas(16) float d_q[C::kRows][C::kPitch];
  std::uint8_t places[C::kWarps][C::kDim];
};

// In backward_dq: what the main loop reads, and in its place DqEpilogue at the end of grouped attention.
template <class C>
struct DqStorage {
  struct Stage {
    SharedTile<C::kKeys, C::kDim> keys, values;
  };
  struct MainLoop {
    SharedTile<C::kRows, C::kDim> queries, d_o;  // Q~ and dO of the block's queries
    Stage stages[kBackwardStages];
    float2 stats[C::kRows];  // -LSE to the base 2, and D
  };
  union {
    MainLoop loop;
    DqEpilogue<C> epilogue;
  };
};

// In convert_dq, where columns are grouped.
template <class C>
struct ConvertDqStorage {
  DqEpilogue<C> epilogue;
};

// What the kernels take by value. The tensors that they read are aligned to 16 bytes, and so are their strides.
struct BackwardParameters {
  DeviceProblem problem;      // with the strides of Q~, K, V and dO (as O's)
  const void* q;              // Q~: q_hat spread over the columns [B, Hq, Nq, d]; exact: Q
  const void* k;              // [B, Hkv, Nk, d]
  const void* v;              // [B, Hkv, Nk, dv]
  const void* d_o;            // [B, Hq, Nq, dv]
  const float2* stats;        // [B, Hq, stats_rows]: -LSE to the base 2, and D; -inf and 0 where no key counts
  std::int64_t stats_rows;    // Nq, up to a multiple of kStatsRows: the rows of `stats` and of `dq_accum` of a head; of
                              // packed sequences padded_rows()
  const std::int32_t* order;  // [B, Hq, blocks, d]
  float scale;
  float* dq_accum;  // where dQ is added: dQ~ / scale, in fragments (backward_dq_atomics.cuh)
  void *d_q, *d_k, *d_v;
  Strides d_q_strides, d_k_strides, d_v_strides;  // any
  int interleaved;                                // heads, at a time (cuda/backward_scheduler.cuh)
  DeviceLengths lengths;                          // of packed sequences
};

// Those of sequence b, which a thread block makes its own.
template <class T>
[[nodiscard]] __device__ inline const BackwardParameters& parameters_of(const BackwardParameters& launched,
                                                                        OwnParameters<BackwardParameters>& own,
                                                                        std::int64_t b) {
  return own.make(launched, [&](BackwardParameters& p) {
    const DeviceSequence sequence(p.problem, p.lengths, b);
    const auto of = [&](const Strides& strides, int first) { return entry_offset(p.lengths, strides, b, first); };
    advance<T>(p.q, of(p.problem.q, sequence.first_row));
    advance<T>(p.k, of(p.problem.k, sequence.first_key));
    advance<T>(p.v, of(p.problem.v, sequence.first_key));
    advance<T>(p.d_o, of(p.problem.o, sequence.first_row));
    advance<T>(p.d_q, of(p.d_q_strides, sequence.first_row));
    advance<T>(p.d_k, of(p.d_k_strides, sequence.first_key));
    advance<T>(p.d_v, of(p.d_v_strides, sequence.first_key));
    p.stats += padded_start(b, sequence.first_row);
    enter(p.problem, p.lengths, sequence);
  });
}

}  // namespace distr::cuda::sm80
