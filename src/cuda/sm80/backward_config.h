// SPDX-License-Identifier: Apache-2.0
// The compiled shapes of the sm_80 backward kernels. Everything that sizes registers or shared memory is here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/problem.h"

namespace distr::cuda::sm80 {

inline constexpr int kBackwardStages = 2;

template <class C>
class RegisterRows;
template <class C>
class SharedRows;

enum class Masks : std::uint8_t { none, tensors };     // what a kernel serves beside causality
enum class Gradients : std::uint8_t { of_keys, all };  // dK and dV, or dQ too, in an order that changes

// dK and dV: a thread block owns kKeys keys of a KV head and meets tiles of kRows queries. kDim: d and dv, padded.
template <class T, int kDim_, Masks kServes, Gradients kGives>
struct DkDvShape {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr bool kMasks = kServes == Masks::tensors;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeyTiles = kDim <= 64 && !kMasks ? 2 : 1;  // m16 tiles of a warp
  static constexpr int kKeys = kWarps * 16 * kKeyTiles;
  static constexpr int kRows = kDim == 256 ? 16 : kDim == 128 && kMasks ? 32 : 64;
  // Thread blocks that share the keys' columns, for which one has not the registers.
  static constexpr int kParts = kDim == 256 ? 2 : 1;
  static constexpr int kColumns = kDim / kParts;
  static constexpr bool kResident = !kMasks && kDim <= 128;  // K and V stay in registers, else in shared memory
  static constexpr bool kAccumulatesDq = kGives == Gradients::all;
  using OwnRows = std::conditional_t<kResident, RegisterRows<DkDvShape>, SharedRows<DkDvShape>>;
  static constexpr int kCtasPerSm = kDim == 32 ? 3 : 2;

  static constexpr int kTileBytes = kRows * kDim * 2;  // of Q~ or dO
  static constexpr int kStatsBytes = kRows * 8;
  static constexpr int kStageBytes = kBackwardStages * (2 * kTileBytes + kStatsBytes);
  static constexpr int kOwnBytes = kKeys * kDim * 2;  // of K or V
  // Shared memory: K and V as far as they stay, K in any case if dQ is added; dS; the stages, which V passes through.
  static constexpr int kGradientsAt = kResident ? (kAccumulatesDq ? kOwnBytes : 0) : 2 * kOwnBytes;
  static constexpr int kStagesAt = kGradientsAt + (kAccumulatesDq ? kKeys * kRows * 2 : 0);
  static constexpr int kSharedBytes = std::max(kStagesAt + kStageBytes, 2 * kOwnBytes);
  static_assert(kSharedBytes <= kMaxSharedBytes);

  // A warp adds dQ in pieces of kSumTiles m16 tiles and kSumColumns columns.
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

  static constexpr int kTileBytes = kKeys * kDim * 2;  // of K or V
  static constexpr int kStageBytes = kBackwardStages * 2 * kTileBytes;
  static constexpr int kOwnBytes = kRows * kDim * 2;  // of Q~ or dO
  static constexpr int kPitch = kDim + 8;             // floats of a row of dQ~, which takes the place of all the others
  static constexpr int kStatsBytes = kRows * 8;
  static constexpr int kSharedBytes = std::max(2 * kOwnBytes + kStageBytes + kStatsBytes, kRows* kPitch * 4);
  static_assert(kSharedBytes <= kMaxSharedBytes);
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
  static constexpr int kPitch = kDim + 8;                  // floats of a row of dQ~
  static constexpr int kSharedBytes = kRows * kPitch * 4;  // where columns are grouped
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// What the kernels take by value. The tensors that they read are aligned to 16 bytes, and so are their strides.
struct BackwardParameters {
  DeviceProblem problem;      // with the strides of Q~, K, V and dO (as O's)
  const void* q;              // Q~: q_hat spread over the columns [B, Hq, Nq, d]; exact: Q
  const void* k;              // [B, Hkv, Nk, d]
  const void* v;              // [B, Hkv, Nk, dv]
  const void* d_o;            // [B, Hq, Nq, dv]
  const float2* stats;        // [B, Hq, stats_rows]: -LSE to the base 2, and D; -inf and 0 where no key counts
  std::int64_t stats_rows;    // Nq, up to a multiple of kStatsRows: the rows of `stats` and of `sums` of a head
  const std::int32_t* order;  // [B, Hq, blocks, d]
  float scale;
  float* sums;  // where dQ is added: dQ~ / scale, in fragments (backward_epilogue.cuh)
  void *d_q, *d_k, *d_v;
  Strides d_q_strides, d_k_strides, d_v_strides;  // any
  int section;                                    // heads that are worked on at the same time
};

}  // namespace distr::cuda::sm80
