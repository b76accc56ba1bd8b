// SPDX-License-Identifier: Apache-2.0
// Hash and order (method, 2.1 and 2.2) of every block of Q, in one launch for l <= 256.
//
//   bit_t(c) = [ sum_n R[n, t] Q_b[n, c] > 0 ],  hash(c) = gray_rank(bits),  order = columns sorted by (hash, column)
//
// A thread block is persistent: it takes block of Q after block of Q, so that R [256 rows, 16 bits] is drawn once.
//   R     One Philox call draws a row. R lies in shared memory as fragments of mma.m16n8k16 (A = R^T, rows as k). Every
//         value is exact in f16 and in bf16, and an f32 of Q is the sum of three bf16, so all products are exact; the
//         sums are fp32.
//   Q     Warps load it from global memory to registers as B fragments (grouping_loads.cuh). The loads of the next
//         block of Q are issued before the sums of this one are added up and sorted.
//   sums  Each warp has [16, 64] sums. The warps of a tile are added in shared memory, in a fixed order.
//   bits  A ballot collects the signs: lane 4 g + t of an accumulator's fragment has bits g and g + 8 of two columns.
//   sort  For each column two lanes count the columns with a smaller (hash, column): that is the column's position.
// Longer blocks are cut into pieces, whose sums go to the workspace; a second kernel adds them up and sorts.
// With `previous` the first block has no rows before it, hence all its hashes are 0 and its order is the identity.
#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "common/half.h"
#include "common/projection.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/grouping.h"
#include "cuda/grouping_loads.cuh"
#include "cuda/grouping_plan.h"
#include "cuda/grouping_rank.cuh"
#include "cuda/ptx.cuh"
#include "cuda/workspace.h"

namespace distr::cuda::lsh {

extern __shared__ uint4 s_dynamic[];

namespace {

using grouping::kChunkRows;
using grouping::kMaxThreads;
using grouping::kPieceRows;
using grouping::kTileColumns;
using grouping::Lane;
using grouping::QueryPieces;
using grouping::RowSpan;

constexpr int kFragments = kTileColumns / 8;  // of sums, for a tile: [16 bits, 8 columns] each
constexpr int kWindowRows = kPieceRows;       // rows of R in shared memory
constexpr int kWarpsPerSm = 16;               // as the launch bounds promise
constexpr int kSumThreads = 512;              // of the kernel that adds pieces

struct Arguments {
  QueryPieces queries;
  int head_dim;
  int tiles;   // of 64 columns
  int groups;  // warps of a tile
  std::uint64_t seed;
  float4* sums;         // [pieces, tiles, kFragments, 32]; null: order at once
  std::int32_t* order;  // [order rows, d]
};

struct Shared {
  std::uint32_t projection[kWindowRows / kChunkRows][32][4];  // A fragments of R^T
  float keys[kMaxHeadDim];                                    // of the columns, of all tiles
};
// Behind it: float4 sums[warps][kFragments][32].
std::size_t shared_bytes(int warps) { return sizeof(Shared) + static_cast<std::size_t>(warps) * kFragments * 32 * 16; }
static_assert(sizeof(Shared) + kMaxThreads / 32 * kFragments * 32 * 16 <= 48 * 1024);

// Quantiles as 16-bit elements.
template <class Element>
constexpr std::array<std::uint16_t, 256> quantile_bits() {
  std::array<std::uint16_t, 256> result{};
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = common::from_float<Element>(common::normal_quantile(static_cast<std::uint8_t>(i))).bits;
  }
  return result;
}
__device__ constexpr std::array<std::uint16_t, 256> kHalfQuantiles = quantile_bits<common::Float16>();
__device__ constexpr std::array<std::uint16_t, 256> kBfloatQuantiles = quantile_bits<common::BFloat16>();

template <class T>
using Factor = std::conditional_t<std::is_same_v<T, __half>, __half, __nv_bfloat16>;  // the type of R

// Rows first .. first + rows - 1 of R. Row 4 t + r of a chunk and bits g and g + 8 belong to lane 4 g + t.
template <class T>
__device__ void draw_projection(std::uint64_t seed, int first, int rows, Shared& shared) {
  const auto& quantiles = std::is_same_v<Factor<T>, __half> ? kHalfQuantiles : kBfloatQuantiles;
  for (int n = static_cast<int>(threadIdx.x); n < rows; n += static_cast<int>(blockDim.x)) {
    const auto words = common::philox({static_cast<std::uint32_t>(first + n), 0, 0, 0},
                                      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
    const int t = n % kChunkRows / 4;
    const int r = n % 4;
#pragma unroll
    for (int bit = 0; bit < common::kHashBits; ++bit) {
      const std::uint32_t index = words[static_cast<std::size_t>(bit / 4)] >> (8 * (bit % 4)) & 0xFFU;
      auto* fragment = shared.projection[n / kChunkRows][4 * (bit % 8) + t];
      reinterpret_cast<std::uint16_t*>(fragment + 2 * (r / 2) + bit / 8)[r % 2] = quantiles[index];
    }
  }
}

// An fp32 minus the bf16 in its upper 16 bits; 0 for an infinity.
__device__ std::uint32_t remainder(std::uint32_t x) {
  const float value = __uint_as_float(x);
  return isinf(value) ? 0U : __float_as_uint(value - __uint_as_float(x & 0xFFFF0000U));
}

// sums[i] += R^T Q over 16 rows, for the i-th column of every lane.
template <class T, std::size_t kWords>
__device__ void project(const std::uint32_t (&projection)[4], const std::array<std::uint32_t, kWords> (&q)[4],
                        float (&sums)[kFragments][4]) {
  constexpr std::uint32_t kLower = 0x5410;
  constexpr std::uint32_t kUpper = 0x7632;
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    if constexpr (kWords == 4) {
      const std::uint32_t half = i % 2 == 0 ? kLower : kUpper;
      ptx::mma_16x8x16(sums[i], projection, __byte_perm(q[0][i / 2], q[1][i / 2], half),
                       __byte_perm(q[2][i / 2], q[3][i / 2], half), Factor<T>{});
    } else {
      std::uint32_t rest[4] = {q[0][i], q[1][i], q[2][i], q[3][i]};
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        ptx::mma_16x8x16(sums[i], projection, __byte_perm(rest[0], rest[1], kUpper),
                         __byte_perm(rest[2], rest[3], kUpper), Factor<T>{});
#pragma unroll
        for (std::uint32_t& x : rest) {
          x = remainder(x);
        }
      }
    }
  }
}

// Packs the bits 0, 4, .. 28 into the lowest 8 bits.
__device__ std::uint32_t every_fourth_bit(std::uint32_t x) {
  x &= 0x11111111U;
  x = (x | x >> 3) & 0x03030303U;
  x = (x | x >> 6) & 0x000F000FU;
  return (x | x >> 12) & 0xFFU;
}

// A float between 1 and 16 that grows with (hash, column). Comparing floats takes fewer instructions than comparing
// integers.
__device__ float key_of(std::uint32_t hash, int column) {
  static_assert(kMaxHeadDim <= 1 << 9);
  return __uint_as_float(__float_as_uint(1.0F) + (hash << 9 | static_cast<std::uint32_t>(column)));
}

// Writes the sort keys of the columns of kCount fragments of sums, from the i-th fragment on. In each of them lane
// 4 g + t has bits g and g + 8 of the columns 2 t and 2 t + 1. Columns that do not exist sort last.
template <int kVector, int kCount>
__device__ void write_keys(const float4 (&sums)[kCount], int tile, int i, int head_dim, float* keys) {
  const int n = static_cast<int>(threadIdx.x % 32);
  std::uint32_t low = 0;
  std::uint32_t high = 0;
#pragma unroll
  for (int fragment = 0; fragment < kCount; ++fragment) {
    const std::uint32_t low_even = __ballot_sync(~0U, sums[fragment].x > 0);
    const std::uint32_t low_odd = __ballot_sync(~0U, sums[fragment].y > 0);
    const std::uint32_t high_even = __ballot_sync(~0U, sums[fragment].z > 0);
    const std::uint32_t high_odd = __ballot_sync(~0U, sums[fragment].w > 0);
    if (n / 8 == fragment) {
      low = n % 2 == 0 ? low_even : low_odd;
      high = n % 2 == 0 ? high_even : high_odd;
    }
  }
  if (n < 8 * kCount) {
    const int g = n % 8;
    const std::uint32_t code = every_fourth_bit(low >> g / 2) | every_fourth_bit(high >> g / 2) << 8;
    const int column = tile * kTileColumns + grouping::column_of(kVector, g, i + n / 8);
    keys[column] = column < head_dim ? key_of(common::gray_rank(code), column) : INFINITY;
  }
}

template <class T, int kVector>
__global__ void __launch_bounds__(kMaxThreads, kVector == 1 ? 1 : 2) order_blocks(const Arguments a) {
  using Round = grouping::Round<T, kVector>;
  auto& shared = *reinterpret_cast<Shared*>(s_dynamic);
  auto* s_sums = reinterpret_cast<float4*>(&shared + 1);  // [warps][kFragments][32]
  const Lane lane(a.groups, a.head_dim);
  const int in_warp = static_cast<int>(threadIdx.x % 32);
  const int round_rows = Round::rows(lane);
  const auto count = static_cast<std::uint32_t>(a.queries.count);

  launch_dependent_grids();
  wait_on_dependent_grids();
  RowSpan rows = a.queries.at(blockIdx.x);
  Round round;
  round.load(rows, 0, lane);
  int window = -1;  // the first row of R in shared memory
  for (std::uint32_t piece = blockIdx.x; piece < count; piece += gridDim.x) {
    const int first = static_cast<int>(piece % a.queries.pieces) * a.queries.piece_rows;  // within the block
    float sums[kFragments][4] = {};
    int n = 0;
    bool finished = false;
    while (!finished) {
      const int in_window = n % kWindowRows;
      if (first + n - in_window != window) {  // the same for all threads
        window = first + n - in_window;
        __syncthreads();
        const int drawn = min(kWindowRows, a.queries.piece_rows);
        draw_projection<T>(a.seed, window, (drawn + round_rows - 1) & -round_rows, shared);  // round_rows: 2^n
        __syncthreads();
      }
#pragma unroll
      for (int chunk = 0; chunk < Round::kChunks; ++chunk) {
        const int at = (in_window + Round::row(lane, chunk)) / kChunkRows;
        const uint4 fragment = *reinterpret_cast<const uint4*>(shared.projection[at][in_warp]);
        project<T>({fragment.x, fragment.y, fragment.z, fragment.w}, round.words[chunk], sums);
      }
      n += round_rows;
      finished = n >= rows.count;
      if (finished) {
        rows = count - piece > gridDim.x ? a.queries.at(piece + gridDim.x) : RowSpan{};
        n = 0;
      }
      round.load(rows, n, lane);
    }

    float4* tile_sums = s_sums + lane.tile * lane.groups * kFragments * 32 + in_warp;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      tile_sums[(lane.group * kFragments + i) * 32] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 2 * lane.group; i < kFragments; i += 2 * lane.groups) {
      float4 totals[2];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        totals[pair] = tile_sums[(i + pair) * 32];
#pragma unroll
        for (int group = 1; group < grouping::kMaxGroups; ++group) {
          if (group < lane.groups) {
            const float4 more = tile_sums[(group * kFragments + i + pair) * 32];
            totals[pair] = {totals[pair].x + more.x, totals[pair].y + more.y, totals[pair].z + more.z,
                            totals[pair].w + more.w};
          }
        }
      }
      if (a.sums != nullptr) {
        float4* to =
            a.sums + ((static_cast<std::int64_t>(piece) * a.tiles + lane.tile) * kFragments + i) * 32 + in_warp;
        to[0] = totals[0];
        to[32] = totals[1];
      } else {
        write_keys<kVector>(totals, lane.tile, i, a.head_dim, shared.keys);
      }
    }
    __syncthreads();
    if (a.sums == nullptr) {
      grouping::write_order_by_key(shared.keys, a.tiles, a.head_dim,
                                   a.order + static_cast<std::int64_t>(piece) * a.head_dim);
    }
  }
}

// Adds up the pieces of a block of Q in their order and sorts the columns. A warp adds a fragment of 8 columns.
template <int kVector>
__global__ void __launch_bounds__(kSumThreads, 1) add_pieces(const Arguments a) {
  alignas(16) __shared__ float s_keys[kMaxHeadDim];
  launch_dependent_grids();
  const auto pieces = static_cast<int>(a.queries.pieces.value());
  const int stride = a.tiles * kFragments * 32;
  wait_on_dependent_grids();
  for (int i = static_cast<int>(threadIdx.x); i < stride; i += static_cast<int>(blockDim.x)) {
    const float4* sums = a.sums + static_cast<std::int64_t>(blockIdx.x) * pieces * stride + i;
    constexpr int kLoadsAhead = 16;  // in flight at the same time
    float4 total[1] = {};
    for (int first = 0; first < pieces; first += kLoadsAhead) {
      float4 loaded[kLoadsAhead];
#pragma unroll
      for (int n = 0; n < kLoadsAhead; ++n) {
        loaded[n] = first + n < pieces ? sums[(first + n) * stride] : float4{};
      }
#pragma unroll
      for (const float4& more : loaded) {
        total[0] = {total[0].x + more.x, total[0].y + more.y, total[0].z + more.z, total[0].w + more.w};
      }
    }
    write_keys<kVector>(total, i / (kFragments * 32), i / 32 % kFragments, a.head_dim, s_keys);
  }
  __syncthreads();
  grouping::write_order_by_key(s_keys, a.tiles, a.head_dim,
                               a.order + static_cast<std::int64_t>(blockIdx.x) * a.head_dim);
}

// What a call does: it is decided here, and a run decides nothing more.
struct Plan {
  DType dtype;
  Arguments arguments;  // but for the pointers
  Part<float4> sums;    // of pieces, if blocks of Q are cut
  bool aligned_rows;
  dim3 grid, sum_grid;
  int threads, sum_threads;
  std::size_t shared;

  static Plan of(const Problem& problem, const Grouping& grouping, WorkspaceLayout& workspace);
  [[nodiscard]] std::vector<LaunchShape> launches() const {
    const TileShape tile{arguments.queries.piece_rows, 0, arguments.head_dim, 0};
    std::vector<LaunchShape> result{{tile, grid.x, threads, static_cast<std::int64_t>(shared)}};
    if (sums.exists()) {
      result.push_back({tile, sum_grid.x, sum_threads, 0});
    }
    return result;
  }

  [[nodiscard]] Arguments with(const GroupingTensors& tensors, void* workspace) const {
    Arguments a = arguments;
    a.queries.q = static_cast<const std::byte*>(tensors.q);
    a.sums = sums.in(workspace);
    a.order = tensors.order;
    return a;
  }
  [[nodiscard]] bool is_aligned(const GroupingTensors& tensors) const {
    return aligned_rows && grouping::is_aligned(tensors.q);
  }
};

Plan Plan::of(const Problem& problem, const Grouping& grouping, WorkspaceLayout& workspace) {
  const QueryPieces queries(problem, grouping);
  const grouping::Warps warps(problem.head_dim);
  const std::int64_t resident = device_properties().num_sms * (kWarpsPerSm / warps.count());
  const Arguments arguments{
      queries, static_cast<int>(problem.head_dim), warps.tiles, warps.groups, grouping.seed, nullptr, nullptr};
  const std::int64_t sums = queries.count * warps.tiles * kFragments * 32;
  const bool aligned_rows =
      grouping::has_aligned_rows(queries.strides, problem.batch, problem.heads_q,
                                 problem.head_dim * static_cast<std::int64_t>(size_of(problem.dtype)));
  return {problem.dtype,
          arguments,
          queries.pieces.value() == 1 ? Part<float4>() : Part<float4>(workspace, "sums of pieces", sums),
          aligned_rows,
          dim3(static_cast<unsigned>(std::min(queries.count, resident))),
          dim3(static_cast<unsigned>(queries.order_rows())),
          warps.count() * 32,
          std::min(kSumThreads, warps.tiles * kFragments * 32),
          shared_bytes(warps.count())};
}

void run_all(const Plan& plan, const GroupingTensors& tensors, const Execution& execution) {
  const Arguments a = plan.with(tensors, execution.workspace);
  grouping::with_loads(plan.dtype, plan.is_aligned(tensors), [&]<class T, int kVector>() {
    launch_dependent(order_blocks<T, kVector>, plan.grid, plan.threads, plan.shared, execution.stream, a);
    if (plan.sums.exists()) {
      launch_dependent(add_pieces<kVector>, plan.sum_grid, plan.sum_threads, 0, execution.stream, a);
    }
  });
}

}  // namespace

std::string supports(const Problem& problem, const Grouping& grouping) {
  return grouping::unsupported_reason(problem, grouping, Strategy::lsh);
}

KernelPlan<GroupingTensors> plan(const Problem& problem, const Grouping& grouping, const Execution& /*execution*/) {
  return grouping::kernel_plan(problem, grouping, run_all);
}

}  // namespace distr::cuda::lsh
